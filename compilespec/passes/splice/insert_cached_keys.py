"""Gives masks that a model computes what the cache holds of earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from compilespec.errors import NotSupported, PassError
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like, node_of
from compilespec.passes.splice.places import Places, step_places
from compilespec.passes.splice.trees import verifies_tree
from compilespec.program import BufferSpec, marker_kind, markers


def insert_cached_keys(step: Splice) -> int:
    """`cached` -> `compilespec::cached_keys` with a separate cache, in the target's blocks;
    `all_positions` -> those that a block table has.  Numerics: exact.  Torch IR.
    """
    found = markers(step.gm, "cached", "all_positions")
    if found and verifies_tree(step.ctx):
        raise NotSupported(
            "the model computes masks over what its cache holds, which does not go with "
            "draft_tree= yet: leave it out"
        )
    return cache_keys(step, found, "target", step_places(step))


def cache_keys(step: Splice, markers: list[fx.Node], owner: str, places: Places) -> int:
    """Rewrite `markers` onto the caches `cache.<owner>.mask.0`, ...

    Args:
        places: those of the tokens of these markers.
    """
    number = 0
    for node in markers:
        with step.before(node):
            if marker_kind(node) == "all_positions":
                config = step.config
                length = config.blocks_per_row * config.block_size
                new = arange_like(places.position, length).to(torch.int64)
            else:
                name = f"cache.{owner}.mask.{number}"
                new = _read_all(step, name, places, *step.values(node.args))
                number += 1
        step.take_place(node, new)
    return len(markers)


def _read_all(step: Splice, name: str, places: Places, x: Tensor, dim: int) -> Tensor:
    """Write x of the tokens to the cache `name`; the same of all tokens of each request, in the
    layout of x, whose dimension of tokens is `dim`.
    """
    shape, dtype = _example(x, name)
    sizes = [int(size or 0) for place, size in enumerate(shape) if place not in (0, dim)]
    width, config = torch.Size(sizes).numel(), step.config
    cache = step.buffer(
        BufferSpec(
            name=name,
            kind="cache",
            shape=(config.num_blocks, config.block_size, 1, width),
            dtype=dtype,
        )
    )
    rows_BSE = x.movedim(dim, 1).flatten(2)
    all_BLE = torch.ops.compilespec.cached_keys.default(
        rows_BSE, cache, places.slot, places.row, places.table
    )
    return all_BLE.unflatten(2, sizes).movedim(1, dim)


def _example(x: Tensor, name: str) -> tuple[tuple[int | None, ...], torch.dtype]:
    example = node_of(x).meta.get("example")
    if example is None:
        raise PassError(f"{name}: what it caches has no known shape")
    return example


def num_cached_keys(ctx: PassContext) -> int | None:
    """The markers that were traced; None without one."""
    return len(markers(ctx.target.graph_module, "cached", "all_positions")) or None
