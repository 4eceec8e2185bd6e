"""Rows of several buffers as bytes, for copies out of them and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from compilespec.ops.device import traits_of

WRITTEN_AT_ONCE = 32  # rows whose copies are on the device beside the buffers


class PackedRows:
    """What lies at one index of the first dimension of each buffer is a row of `num_bytes`.

    Copies stand in the order of the launches: they see what the ones before wrote.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self.num_bytes = sum(b[0].numel() * b.element_size() for b in buffers)
        self.device = buffers[0].device

    def read(self, indices: Sequence[int]) -> Tensor:
        """The rows on the device, [rows, num_bytes]."""
        index = torch.tensor(indices, dtype=torch.int64, device=self.device)
        parts = [b.index_select(0, index).flatten(1).view(torch.uint8) for b in self._buffers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def write(self, indices: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Write rows of [num_bytes], wherever they lie."""
        for some in _slices(len(rows), WRITTEN_AT_ONCE):
            packed = torch.empty(
                (len(rows[some]), self.num_bytes), dtype=torch.uint8, device=self.device
            )
            for place, row in zip(packed, rows[some], strict=True):
                place.copy_(row, non_blocking=True)
            index = torch.tensor(indices[some], dtype=torch.int64, device=self.device)
            widths = [b[0].numel() * b.element_size() for b in self._buffers]
            for buffer, part in zip(self._buffers, packed.split(widths, dim=1), strict=True):
                values = part.contiguous().view(buffer.dtype)
                buffer.index_copy_(0, index, values.view(-1, *buffer.shape[1:]))

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


def _nothing() -> None:
    """The rows are there."""


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
