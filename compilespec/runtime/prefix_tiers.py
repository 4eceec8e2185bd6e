"""The prefix cache beyond the pool: blocks that it gave up, in host memory and in a folder.

An entry is a block of every cache of the program, the drafter's included, or a copy of recurrent
states, under the key of `PrefixCache`.  Host memory takes what is about to be written over; the
folder takes every block once it is published, so that it outlives a crash.  Both give it back
between two steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal

from torch import Tensor

from compilespec.runtime.packed_rows import PackedRows, copy_row
from compilespec.runtime.prefix_files import PrefixFiles

Kind = Literal["block", "state"]
PIECE_BYTES = 2**26  # host memory is taken in pieces of about this size
SAVED_AT_ONCE = 32  # entries that go to the folder together
WAIT_S = 0.05  # an idle engine waits so long for the folder before it looks for other work


class HostEntries:
    """Entries in host memory, within a number of bytes: those not used for longest go first."""

    def __init__(self, rows: PackedRows, max_bytes: int) -> None:
        self._rows = rows
        self._per_piece = max(1, min(PIECE_BYTES, max_bytes) // rows.num_bytes)
        self._num_places = max_bytes // rows.num_bytes
        self._place_of: OrderedDict[str, int] = OrderedDict()  # the latest used last
        self._pieces: list[Tensor] = []
        self._free: list[int] = []

    def __contains__(self, name: str) -> bool:
        return name in self._place_of

    @property
    def num_bytes(self) -> int:
        """The memory that was taken so far."""
        return sum(piece.nbytes for piece in self._pieces)

    def touch(self, names: Iterable[str]) -> None:
        for name in names:
            self._place_of.move_to_end(name)

    def put(self, names: Sequence[str], rows: Tensor, wanted: Collection[str]) -> None:
        """Keep entries; none of the `wanted` ones makes room for them."""
        for name, row in zip(names, rows, strict=True):
            if name in self._place_of or (place := self._take(wanted)) is None:
                continue
            copy_row(self._row(place), row)
            self._place_of[name] = place

    def get(self, name: str) -> Tensor:
        return self._row(self._place_of[name])

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._place_of:
                self._free.append(self._place_of.pop(name))

    def clear(self) -> None:
        """Forget all, and give the memory back."""
        self._place_of.clear()
        self._pieces, self._free = [], []

    def _take(self, wanted: Collection[str]) -> int | None:
        first = len(self._pieces) * self._per_piece
        if not self._free and first < self._num_places:
            count = min(self._per_piece, self._num_places - first)
            self._pieces.append(self._rows.on_host(count))
            self._free = list(range(first + count - 1, first - 1, -1))
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._place_of), None)
        return None if oldest is None or oldest in wanted else self._place_of.pop(oldest)

    def _row(self, place: int) -> Tensor:
        piece, row = divmod(place, self._per_piece)
        return self._pieces[piece][row]


class PrefixTiers:
    """Finds, keeps and gives back entries; between two steps, on the engine's thread.

    Args:
        blocks: of all caches; states: the copies of recurrent states; None: there are none.
        host_bytes: of host memory, half of it for states where there are any; 0: none is used.
        files: the folder; None: there is none.
    """

    def __init__(
        self,
        blocks: PackedRows,
        states: PackedRows | None,
        host_bytes: int,
        files: PrefixFiles | None,
    ) -> None:
        self.rows: dict[Kind, PackedRows] = {"block": blocks}
        if states is not None:
            self.rows["state"] = states
        share = host_bytes // len(self.rows)
        self.host: dict[Kind, HostEntries] = {
            kind: HostEntries(rows, share) for kind, rows in self.rows.items() if host_bytes
        }
        self.files = files
        self.num_from_host = self.num_from_disk = 0  # blocks
        self._wanted: frozenset[str] = frozenset()  # the entries that a request is about to take
        self._read: dict[str, Tensor] = {}  # entries of the folder
        self._asked: dict[str, Tensor] = {}  # those that are being read
        self._reading: Future[list[bool]] | None = None

    # --- finding ---

    def num_found(self, keys: Sequence[bytes]) -> int:
        """The number of blocks of the beginning that are here."""
        missing = (n for n, key in enumerate(keys) if not self._has(_name(key, "block")))
        return next(missing, len(keys))

    def deepest_state(self, keys: Sequence[bytes], above: int) -> int:
        """The number of blocks before the deepest state along these keys; 0 where none lies deeper
        than `above`.
        """
        counts = range(len(keys), above, -1)
        return next((n for n in counts if self._has(_name(keys[n - 1], "state"))), 0)

    def ready(
        self, blocks: Sequence[bytes], states: Sequence[bytes], *, waits: bool
    ) -> bool | None:
        """Bring entries into memory, where they stay until others are asked for.

        Args:
            waits: wait a moment for what must be read.
        Returns: False where they are being read; None where one of them turned out to be damaged,
            and is not found any more.
        """
        named = {_name(key, "block"): self.rows["block"] for key in blocks}
        named |= {_name(key, "state"): self.rows["state"] for key in states}
        if not self._has_read(waits=waits):
            return False
        is_whole = self._end_reading()
        self._wanted = frozenset(named)
        for entries in self.host.values():
            entries.touch([name for name in named if name in entries])
        self._read = {name: row for name, row in self._read.items() if name in named}
        missing = [n for n in named if n not in self._read and not self._is_on_host(n)]
        if not missing:
            return True
        if not is_whole:
            return None
        assert self.files is not None, "it was found there"
        self._asked = {name: named[name].on_host(1)[0] for name in missing}
        self._reading = self.files.fetch(missing, list(self._asked.values()))
        is_read = self._has_read(waits=waits)
        return self.ready(blocks, states, waits=waits) if is_read else False

    def load(self, kind: Kind, keys: Sequence[bytes], places: Sequence[int]) -> None:
        """Write entries that are `ready` into blocks, or places of states."""
        names = [_name(key, kind) for key in keys]
        from_disk = sum(name in self._read for name in names)
        rows = [self._read[n] if n in self._read else self.host[kind].get(n) for n in names]
        self.rows[kind].write(places, rows)
        if kind == "block":
            self.num_from_disk += from_disk
            self.num_from_host += len(names) - from_disk
            self._read = {}

    # --- keeping ---

    def keep_evicted(self, kind: Kind, keys: Sequence[bytes], places: Sequence[int]) -> None:
        """Take what is about to be written over into host memory."""
        entries = self.host.get(kind)
        named = {_name(k, kind): p for k, p in zip(keys, places, strict=True)}
        named = {n: place for n, place in named.items() if entries and n not in entries}
        if entries is not None and named:
            rows = self.rows[kind].read(list(named.values()))
            entries.put(list(named), rows, self._wanted)

    def publish(self, kind: Kind, keys: Sequence[bytes], places: Sequence[int]) -> None:
        """Write what is complete into the folder, in the background."""
        if self.files is None or self.files.is_off:
            return
        named = {_name(k, kind): p for k, p in zip(keys, places, strict=True)}
        named = {n: place for n, place in named.items() if not self.files.has(n)}
        names = list(named)
        for start in range(0, len(names), SAVED_AT_ONCE):
            some = names[start : start + SAVED_AT_ONCE]
            rows = self.rows[kind].read([named[name] for name in some])
            self.files.save(some, *self.rows[kind].copy(rows))

    # --- forgetting ---

    def forget(self, keys: Iterable[bytes]) -> None:
        names = [_name(key, kind) for key in keys for kind in self.rows]
        for entries in self.host.values():
            entries.remove(names)
        if self.files is not None:
            self.files.remove(names)

    def forget_all(self) -> None:
        """Forget what is in host memory, and what is being read."""
        for entries in self.host.values():
            entries.clear()
        self._end_reading()
        self._read, self._wanted = {}, frozenset()

    def renew(self, *, empties: bool) -> None:
        """The weights may be others now.

        Args:
            empties: delete the entries of the folder, which else stay for other engines.
        """
        if self.files is not None:
            if empties:
                self.files.remove_all()
            self.files.renew()

    def close(self) -> None:
        """Finish writing, and let the buffers go."""
        if self.files is not None:
            self.files.close()
        self.forget_all()
        self.rows = {}

    def describe(self) -> dict[str, Any]:
        """The sizes of what is kept, for `Engine.plan()`."""
        plan: dict[str, Any] = {k: f"{rows.num_bytes} bytes" for k, rows in self.rows.items()}
        plan["host_mib"] = sum(entries.num_bytes for entries in self.host.values()) / 2**20
        if self.files is not None:
            plan["disk_mib"] = self.files.num_bytes / 2**20
        return plan

    # --- helpers ---

    def _has(self, name: str) -> bool:
        return self._is_on_host(name) or (self.files is not None and self.files.has(name))

    def _is_on_host(self, name: str) -> bool:
        return any(name in entries for entries in self.host.values())

    def _has_read(self, *, waits: bool) -> bool:
        """True where nothing is being read."""
        if self._reading is not None and waits:
            wait([self._reading], WAIT_S)
        return self._reading is None or self._reading.done()

    def _end_reading(self) -> bool:
        """Take what was read; False where some of it was damaged."""
        if self._reading is None:
            return True
        good, self._reading = self._reading.result(), None
        self._read |= {
            name: row for (name, row), ok in zip(self._asked.items(), good, strict=True) if ok
        }
        return all(good)


def _name(key: bytes, kind: Kind) -> str:
    return f"{key.hex()}.{kind}"
