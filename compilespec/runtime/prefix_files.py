"""Entries of the prefix cache in a folder, which outlive the engine.

An entry is a file `VERSION/NAME`: a header with its version, name and checksum, then the bytes.
The version names the program and its weights, so that an entry of another model, or of other code,
is never found.  A file appears whole or not at all, and several engines may share a folder.  One
thread reads and writes, in order; the engine's own only asks whether an entry is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from compilespec.errors import InvalidOption

logger = logging.getLogger("compilespec")

MAGIC = b"cspkv001"
HEADER = struct.Struct("<8s32s40sQI")  # magic, version, name, bytes, checksum
VERSION, ENTRY = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{32}\.(block|state)")
PART = re.compile(r"[0-9a-f]{32}\.(block|state)\.[0-9a-f]+\.part")
LEFT_BEHIND_S = 3600.0  # a file that is being written for longer is nobody's
MAX_WAITING_BYTES = 2**30  # of entries that wait to be written; more are not kept
LOOK_AGAIN = 16  # parts of the bound after which the folder is measured again


class PrefixFiles:
    """Entries by their names, within a number of bytes: those not used for longest go first.

    Args:
        max_bytes: of all files of the folder together, those of other versions included.
        version: 32 hexadecimal digits for the program and the weights that it has now.
    Raises: InvalidOption for a folder that cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int, version: Callable[[], str]) -> None:
        self._folder, self._max_bytes, self._make_version = folder, max_bytes, version
        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}  # the one used longest ago first
        self.num_bytes = 0  # of these
        self._num_new_bytes = 0  # written since the folder was measured
        self._num_waiting_bytes = 0
        self._told: set[str] = set()
        self.is_off = False
        self.version = version()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._measure()
        except OSError as error:
            raise InvalidOption(f"prefix_dir: {error}; name another folder") from error
        others = sum(path.parent.name != self.version for path in self._sizes)
        if others:
            self._tell_once(
                f"{others} entries are of other weights, or of another program or version of "
                "compilespec or torch: they are not used, and make room first"
            )
        self._worker = ThreadPoolExecutor(1, "compilespec-prefix-files")

    def has(self, name: str) -> bool:
        """True where an entry is there; it may turn out to be damaged when it is read."""
        path = self._path(self.version, name)
        return not self.is_off and (path in self._sizes or path.exists())

    def save(self, names: Sequence[str], rows: Tensor, arrived: Callable[[], object]) -> None:
        """Write entries later, unless too many wait.

        Args:
            rows: on the host, once `arrived` returns.
        """
        with self._lock:
            has_room = self._num_waiting_bytes + rows.nbytes <= MAX_WAITING_BYTES
            if self.is_off or not has_room:
                return
            self._num_waiting_bytes += rows.nbytes
        self._worker.submit(self._write_all, self.version, names, rows, arrived)

    def fetch(self, names: Sequence[str], rows: Sequence[Tensor]) -> Future[list[bool]]:
        """Begin to read entries into rows on the host; the result says which were good."""
        return self._worker.submit(self._read_all, self.version, names, rows)

    def remove(self, names: Iterable[str]) -> None:
        """Delete entries, those that wait to be written too."""
        self._worker.submit(self._remove, [self._path(self.version, name) for name in names])

    def remove_all(self) -> None:
        """Delete all entries of this version."""
        self._worker.submit(self._remove_version, self.version)

    def renew(self) -> None:
        """Entries are of the present weights from now on."""
        self.version = self._make_version()

    def finish(self) -> None:
        """Wait until everything is written."""
        self._worker.submit(int).result()

    def close(self) -> None:
        """`finish`, and end the thread."""
        self._worker.shutdown(wait=True)

    # --- on the worker ---

    def _write_all(
        self, version: str, names: Sequence[str], rows: Tensor, arrived: Callable[[], object]
    ) -> None:
        try:
            arrived()
            for name, row in zip(names, rows, strict=True):
                if not self.is_off:
                    self._write(version, name, row)
        except OSError as error:
            self.is_off = True
            self._tell_once(
                f"an entry cannot be written ({error.strerror or error}); nothing is kept there or "
                "found there any more"
            )
        except Exception:  # of a device: the engine hears of it in its next step
            logger.exception("prefix_dir: an entry was not written")
        finally:
            with self._lock:
                self._num_waiting_bytes -= rows.nbytes

    def _write(self, version: str, name: str, row: Tensor) -> None:
        path, data = self._path(version, name), row.numpy().data
        size = HEADER.size + data.nbytes
        if size > self._max_bytes or path.exists():
            return
        if self._num_new_bytes > self._max_bytes // LOOK_AGAIN:
            self._measure()
        self._make_room(size)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        passing = path.with_name(f"{name}.{secrets.token_hex(8)}.part")
        try:
            with passing.open("wb") as file:
                file.write(_header(version, name, data))
                file.write(data)
            passing.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                passing.unlink()
            raise
        self._note(path, size)
        self._num_new_bytes += size

    def _read_all(self, version: str, names: Sequence[str], rows: Sequence[Tensor]) -> list[bool]:
        return [self._read(version, name, row) for name, row in zip(names, rows, strict=True)]

    def _read(self, version: str, name: str, row: Tensor) -> bool:
        path, data = self._path(version, name), row.numpy().data
        try:
            with path.open("rb") as file:
                header = file.read(HEADER.size)
                is_whole = file.readinto(data) == data.nbytes and not file.read(1)
            is_whole = is_whole and header == _header(version, name, data)
            if is_whole:
                os.utime(path)
                self._note(path, HEADER.size + data.nbytes)
                return True
            self._tell_once(f"{path.name} is damaged, or was written by something else; ignored")
        except FileNotFoundError:  # another engine made room
            pass
        except OSError as error:
            self._tell_once(f"{path.name} cannot be read ({error.strerror or error}); ignored")
        self._remove([path])
        return False

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self.num_bytes -= self._sizes.pop(path, 0)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _remove_version(self, version: str) -> None:
        with contextlib.suppress(OSError):
            self._remove(path for path in (self._folder / version).iterdir() if _is_ours(path))

    def _note(self, path: Path, size: int) -> None:
        """An entry is there, and was used last."""
        self.num_bytes += size - self._sizes.pop(path, 0)
        self._sizes[path] = size

    def _make_room(self, size: int) -> None:
        while self._sizes and self.num_bytes + size > self._max_bytes:
            self._remove([next(iter(self._sizes))])

    def _measure(self) -> None:
        """Look at every file: other engines write and delete, too."""
        found = []
        for path in [*self._folder.glob("*"), *self._folder.glob("*/*")]:
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if PART.fullmatch(path.name):
                    if time.time() - stat.st_mtime > LEFT_BEHIND_S:
                        path.unlink()
                elif _is_ours(path):
                    found.append((stat.st_mtime_ns, path, stat.st_size))
                elif not (path.is_dir() and VERSION.fullmatch(path.name)):
                    self._tell_once(f"{path.name} is no entry of a prefix cache; ignored")
        self._sizes = {path: size for _, path, size in sorted(found)}
        self.num_bytes = sum(self._sizes.values())
        self._num_new_bytes = 0

    def _path(self, version: str, name: str) -> Path:
        return self._folder / version / name

    def _tell_once(self, what: str) -> None:
        """Warn, once of each kind."""
        kind = what.partition(" ")[2]
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("prefix_dir %s: %s", self._folder, what)


def _is_ours(path: Path) -> bool:
    return bool(ENTRY.fullmatch(path.name) and VERSION.fullmatch(path.parent.name))


def _header(version: str, name: str, data: memoryview) -> bytes:
    check = zlib.crc32(data, zlib.crc32(f"{version} {name}".encode()))
    return HEADER.pack(MAGIC, version.encode(), name.encode(), data.nbytes, check)
