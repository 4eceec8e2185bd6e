"""Rows of several buffers as bytes, for copies out of them and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from compilespec.ops.device import traits_of

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
WRITTEN_AT_ONCE = 32  # rows whose copies are on the device beside the buffers


class PackedRows:
    """A row is what lies at one index of the first dimension of each buffer: `num_bytes`.

    Copies stand in the order of the launches: they see what the ones before wrote.  On the CPU
    numpy makes them: for pieces this small, threads of torch on shared cores cost much more.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = [buffer.view(WORDS[buffer.element_size()]) for buffer in buffers]
        self._widths = [b[0].numel() * b.element_size() for b in buffers]
        self.num_bytes = sum(self._widths)
        self.device = buffers[0].device

    def read(self, indices: Sequence[int]) -> Tensor:
        """The rows on the device, [rows, num_bytes]."""
        if traits_of(self.device).is_cpu:
            taken = [np.ascontiguousarray(b.numpy()[list(indices)]) for b in self._buffers]
            flat = [part.reshape(len(indices), -1).view(np.uint8) for part in taken]
            return torch.from_numpy(np.concatenate(flat, axis=1))
        index = torch.tensor(indices, dtype=torch.int64, device=self.device)
        parts = [b.index_select(0, index).flatten(1).view(torch.uint8) for b in self._buffers]
        return torch.cat(parts, dim=1)

    def write(self, indices: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Write rows of [num_bytes], wherever they lie."""
        for some in _slices(len(rows), WRITTEN_AT_ONCE):
            shape = (len(rows[some]), self.num_bytes)
            packed = torch.empty(shape, dtype=torch.uint8, device=self.device)
            for place, row in zip(packed, rows[some], strict=True):
                copy_row(place, row)
            self._unpack(list(indices[some]), packed)

    def _unpack(self, indices: list[int], packed: Tensor) -> None:
        index = torch.tensor(indices, dtype=torch.int64, device=self.device)
        for buffer, part in zip(self._buffers, packed.split(self._widths, 1), strict=True):
            shape = (len(indices), *buffer.shape[1:])
            if traits_of(buffer).is_cpu:
                values = np.ascontiguousarray(part.numpy()).view(buffer.numpy().dtype)
                buffer.numpy()[indices] = values.reshape(shape)
            else:
                buffer.index_copy_(0, index, part.contiguous().view(buffer.dtype).view(shape))

    def on_host(self, count: int) -> Tensor:
        """Host memory for rows, pinned where they go to another device; not filled."""
        shape = (count, self.num_bytes)
        if traits_of(self.device).is_cpu:
            return torch.empty(shape, dtype=torch.uint8)
        with torch.cuda.device(self.device):
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def copy(self, rows: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """Rows of `read` on their way into host memory, and what waits until they are there."""
        if traits_of(self.device).is_cpu:
            return rows, _nothing
        host, arrived = self.on_host(len(rows)), torch.cuda.Event()
        host.copy_(rows, non_blocking=True)
        arrived.record(torch.cuda.current_stream(self.device))
        return host, arrived.synchronize


def copy_row(place: Tensor, row: Tensor) -> None:
    """Copy the bytes of a row, in the order of the launches where one of the two is on a device."""
    if traits_of(place).is_cpu and traits_of(row).is_cpu:
        place.numpy()[...] = row.numpy()
    else:
        place.copy_(row, non_blocking=True)


def _nothing() -> None:
    """The rows are there."""


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
