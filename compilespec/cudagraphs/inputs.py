"""Batch inputs at fixed addresses, written by the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compilespec.cudagraphs.staging import Staging

# Row -1 reads and writes nothing, so the other inputs of a padded row may hold any legal value.
_PADDED_ROW = -1
_ROWS = ("row_B", "row_T", "commit_row_R", "given_T")
_ALIGNMENT = 64  # int32 entries: compiled kernels count on aligned addresses


class BatchInputs:
    """The int32 batch inputs of a phase, in one device buffer: one copy transfers a batch."""

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
        self._staging = Staging(torch.zeros(total, dtype=torch.int32, device=device))

    def views(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The inputs at the given sizes, by name: always at the same addresses."""
        return {
            name: self._staging.buffer[start : start + sizes[name[-1]]]
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
        host = self._staging.open()
        for name, start in self._offsets.items():
            values, size = batch.get(name, ()), sizes[name[-1]]
            fill = _PADDED_ROW if name in _ROWS else (padding or {}).get(name, 0)
            host[start : start + len(values)] = values
            host[start + len(values) : start + size] = fill
        self._staging.send()
