"""The buffers that hold the matrices of adapters, one place for each adapter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compilespec.program import AdapterShape
from compilespec.tracing.adapter_files import LowRank


def product_sizes(
    buffers: Mapping[str, Tensor], shape: AdapterShape
) -> Mapping[str, tuple[int, int]]:
    """(out, in) of the products that adapters may change, by path."""
    return {
        path: (buffers[f"adapter.{path}.up"].shape[1], buffers[f"adapter.{path}.down"].shape[1])
        for path in shape.modules
    }


def write_adapter(
    buffers: Mapping[str, Tensor], shape: AdapterShape, place: int, modules: Mapping[str, LowRank]
) -> None:
    """Write A and B^T into the rows of a place; zeros where there is nothing.

    Addresses stay, so that captured graphs find them.  On CUDA the copies run on the stream behind
    the steps that were launched.
    """
    first, end = place * shape.rank, (place + 1) * shape.rank
    with torch.no_grad():
        for path in shape.modules:
            down = buffers[f"adapter.{path}.down"][first:end]
            up = buffers[f"adapter.{path}.up"][first:end]
            down.zero_()
            up.zero_()
            if (part := modules.get(path)) is not None:
                down[: part.rank].copy_(part.down)
                up[: part.rank].copy_(part.up.t())
