"""The host's writes into state rows between two calls of the program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compilespec.cudagraphs.staging import Staging
from compilespec.ops.device import traits_of

_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}
_ALIGNMENT = 16  # bytes: views of another dtype begin at its multiples
_FIRST_BYTES = 1 << 16
_LONG = 1024  # a write of more values gets its own copy on the device


class HostWrites:
    """Writes into buffers, in the order in which they are asked for.

    On CUDA they wait on the host until `send`: one asynchronous copy takes all of them to the
    device, and they are put in their places there, on the same stream.  So the host never waits for
    a running step, and that step never sees writes for the next one.  On the CPU a write is made at
    once.
    """

    def __init__(self, buffers: Mapping[str, Tensor], device: torch.device) -> None:
        """Begin with nothing to write.

        Args:
            buffers: contiguous; those that are written are of int32, int64 or float32.
        """
        self.buffers = buffers
        self.num_copies = 0  # to the device
        self._waits = traits_of(device).is_cuda
        self._device = device
        self._pending: dict[str, list[_Write]] = {}
        self._arrays: dict[str, Any] = {}  # on the CPU: the buffers' own memory
        self._staging: Staging | None = None

    def write(self, name: str, row: int, values: Any, start: int = 0) -> None:
        """Write into a row of a buffer.

        Args:
            values: numbers, or an array or tensor on the CPU, in the order in which they lie in the
                row; start: where the first one goes, in the row's elements.
        """
        buffer = self.buffers[name]
        numbers = np.asarray(values, dtype=_DTYPES[buffer.dtype]).reshape(-1)
        assert start + len(numbers) <= buffer.stride(0), f"{name}: past the end of a row"
        place = row * buffer.stride(0) + start
        if self._waits:
            self._pending.setdefault(name, []).append(_Write(place, numbers.copy()))
            return
        if name not in self._arrays:
            self._arrays[name] = buffer.view(-1).numpy()
        self._arrays[name][place : place + len(numbers)] = numbers

    def send(self) -> None:
        """Send the pending writes without waiting.  Call it before each call that reads the
        buffers.
        """
        if not self._pending:
            return
        moves = [(n, move) for n, writes in self._pending.items() for move in _moves(writes)]
        ends = np.cumsum([move.num_bytes for _, move in moves]).tolist()
        staging = self._staging_of(ends[-1])
        host = staging.open()
        for (_, move), end in zip(moves, ends, strict=True):
            move.pack(host[end - move.num_bytes : end])
        staging.send(ends[-1])
        for (name, move), end in zip(moves, ends, strict=True):
            move.unpack(staging.buffer[end - move.num_bytes : end], self.buffers[name].view(-1))
        self._pending = {}
        self.num_copies += 1

    def _staging_of(self, num_bytes: int) -> Staging:
        """A stage that holds that many bytes.  Copies out of a replaced one keep its memory."""
        if self._staging is None or len(self._staging.buffer) < num_bytes:
            size = max(_FIRST_BYTES, 1 << (num_bytes - 1).bit_length())
            self._staging = Staging(torch.empty(size, dtype=torch.uint8, device=self._device))
        return self._staging


@dataclass(frozen=True)
class _Write:
    """Numbers for consecutive places of a flattened buffer."""

    place: int
    numbers: Any

    @property
    def end(self) -> int:
        return self.place + len(self.numbers)


@dataclass(frozen=True)
class _Move:
    """Numbers of one buffer: for consecutive places from `first` on, or for those of `index`."""

    numbers: Any
    first: int = 0
    index: Any = None

    @property
    def num_bytes(self) -> int:
        return self._index_bytes + -(-self.numbers.nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def _index_bytes(self) -> int:
        return 0 if self.index is None else -(-self.index.nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, host: Any) -> None:
        """Fill the bytes that the device will receive."""
        if self.index is not None:
            host[: self.index.nbytes] = self.index.view(np.uint8)
        host[self._index_bytes :][: self.numbers.nbytes] = self.numbers.view(np.uint8)

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Put the numbers in their places; all on the device."""
        count = len(self.numbers)
        numbers = packed[self._index_bytes :].view(flat.dtype)[:count]
        if self.index is None:
            flat[self.first : self.first + count].copy_(numbers)
        else:
            flat.index_copy_(0, packed[: self.index.nbytes].view(torch.int64), numbers)


def _moves(writes: Sequence[_Write]) -> Iterator[_Move]:
    """The moves that make a buffer's writes: one each for long ones, one for all short ones."""
    if len(writes) == 1 or any(len(write.numbers) >= _LONG for write in writes):
        for write in writes:
            yield _Move(write.numbers, first=write.place)
        return
    index = np.concatenate([np.arange(write.place, write.end) for write in writes])
    numbers = np.concatenate([write.numbers for write in writes])
    ordered = sorted(writes, key=lambda write: write.place)
    if any(after.place < before.end for before, after in itertools.pairwise(ordered)):
        # the last write of a place counts; the device keeps no order
        _, last = np.unique(index[::-1], return_index=True)
        index, numbers = index[::-1][last], numbers[::-1][last]
    yield _Move(numbers, index=index)
