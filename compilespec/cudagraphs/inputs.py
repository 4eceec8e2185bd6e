"""Batch inputs at fixed addresses, written by the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Row -1 reads and writes nothing, so the other inputs of a padded row may hold any legal value.
_PADDED_ROW = -1
_ROWS = ("row_B", "row_T", "commit_row_R")
_ALIGNMENT = 64  # int32 entries: compiled kernels count on aligned addresses
_NUM_STAGES = 2  # batches that may be in transit to the device at once


class BatchInputs:
    """The int32 batch inputs of a phase, in one device buffer: one copy transfers a batch.

    On CUDA the host writes pinned memory, one stage per batch, and waits only if the stage's last
    copy has not run yet.  On the CPU the host writes the buffer itself.
    """

    def __init__(
        self, names: Sequence[str], limits: Mapping[str, int], device: torch.device
    ) -> None:
        """Allocate for the largest batch.

        Args:
            names: inputs, the last letter of each its dimension; limits: largest size of each
                dimension.
        """
        self._offsets: dict[str, int] = {}
        total = 0
        for name in names:
            self._offsets[name] = total
            total += -(-limits[name[-1]] // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        self._stages = [
            _Stage(self._buffer) for _ in range(_NUM_STAGES if device.type == "cuda" else 1)
        ]

    def views(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The inputs at the given sizes, by name: always at the same addresses."""
        return {
            name: self._buffer[start : start + sizes[name[-1]]]
            for name, start in self._offsets.items()
        }

    def write(
        self,
        batch: Mapping[str, Sequence[int]],
        sizes: Mapping[str, int],
        padding: Mapping[str, int] | None = None,
    ) -> None:
        """Put a batch into its bucket; no host sync.

        Args:
            batch: by name, entries of the live rows; a missing name is all padding.
            sizes: of the bucket; padding: values of padded entries, 0 where not given, rows -1.
        """
        stage = self._stages.pop(0)
        self._stages.append(stage)
        host = stage.open()
        for name, start in self._offsets.items():
            values, size = batch.get(name, ()), sizes[name[-1]]
            fill = _PADDED_ROW if name in _ROWS else (padding or {}).get(name, 0)
            host[start : start + len(values)] = values
            host[start + len(values) : start + size] = fill
        stage.send()


class _Stage:
    """Host memory for a batch on its way to `target`; on the CPU the target's own."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._pinned, self._sent = target, None
        if target.is_cuda:
            self._pinned = torch.zeros(len(target), dtype=torch.int32, pin_memory=True)
            self._sent = torch.cuda.Event()
        self._host = self._pinned.numpy()

    def open(self) -> Any:
        """The memory as an array, once its last batch has reached the device."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._host

    def send(self) -> None:
        if self._sent is not None:
            self._target.copy_(self._pinned, non_blocking=True)
            self._sent.record(torch.cuda.current_stream(self._target.device))
