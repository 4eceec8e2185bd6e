"""Traits of devices: a choice that differs between a CPU and a GPU has a name here."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class DeviceTraits:
    """The traits of a kind of device.  `traits_of` gives those of a device."""

    kind: str  # torch's name: "cpu", "cuda", "meta", ...
    packs_weights: bool = False  # kernels read weights in their own layout
    merges_products: bool = False  # products of one activation become one
    caches_heads_first: bool = False  # a cache lies head by head in memory
    has_launch_costs: bool = False  # a launch takes the host longer than a small operator runs
    fuses_heads: bool | None = False  # products with heads give their argmax; None: as sizes say
    int4_group: int = 32  # weights that share a scale: a sector of each row at a time

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_meta(self) -> bool:
        """True where tensors have shapes and no memory."""
        return self.kind == "meta"


CPU = DeviceTraits(kind="cpu", packs_weights=True, merges_products=True, caches_heads_first=True)
CUDA = DeviceTraits(
    kind="cuda", merges_products=True, has_launch_costs=True, fuses_heads=None, int4_group=64
)
_TRAITS = {"cpu": CPU, "cuda": CUDA}


def traits_of(where: torch.device | torch.Tensor) -> DeviceTraits:
    """The traits of a device, or of the one that a tensor lies on."""
    device = where.device if isinstance(where, torch.Tensor) else where
    return _TRAITS.get(device.type) or DeviceTraits(kind=device.type)
