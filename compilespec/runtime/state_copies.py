"""Copies of the recurrent states of state rows (which of them, `KeptCopies` decides)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compilespec.program import BufferSpec
from compilespec.runtime.buffers import allocate


class StateCopies:
    """Room for copies of the states of `specs`, on the device.

    A copy stands in the order of the launches: it sees what the ones before it wrote.
    """

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        buffers: Mapping[str, Tensor],
        num_places: int,
        device: torch.device,
    ) -> None:
        own = [replace(spec, shape=(num_places, *spec.shape[1:])) for spec in specs]
        self.pairs = [  # states, copies
            (buffers[spec.name], allocate(spec, device)) for spec in own
        ]

    @property
    def num_bytes(self) -> int:
        return sum(kept.nbytes for _, kept in self.pairs)

    def keep(self, row: int, place: int) -> None:
        for states, kept in self.pairs:
            kept[place].copy_(states[row])

    def restore(self, place: int, row: int) -> None:
        for states, kept in self.pairs:
            states[row].copy_(kept[place])

    def close(self) -> None:
        self.pairs.clear()
