"""Turns attention markers into reads and writes of the block-paged KV cache."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from compilespec.errors import NotSupported, PassError
from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer, emit, find_role
from compilespec.passes.kv_groups import KVGroup, Metadata, group_metadata
from compilespec.passes.linears import copy_origin
from compilespec.passes.sights import Sights, read_sights
from compilespec.passes.trees import verifies_tree
from compilespec.program import BufferSpec, markers, module_path
from compilespec.tracing.structure import shape_of

# Memory order of a cache [num_blocks, block_size, Nkv, H] where attention reads one head's cells
# at a time, as on the CPU: they follow each other, from block to block.
HEADS_FIRST = (2, 0, 1, 3)


def insert_paged_attention(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Marker -> `compilespec::paged_attention` with the layer's caches and this step's metadata.
    Numerics: rounding (the same sums over the same keys, in another order).  Runs on torch IR."""
    table = find_role(gm, "block_table_RM")
    slot, row, position = (find_role(gm, role) for role in ("slot", "row", "position"))
    found, branches = markers(gm), None
    if verifies_tree(ctx) and found:  # what is accepted is written later
        slot = emit(gm, lambda slot_BS: torch.full_like(slot_BS, -1), slot, before=found[0])
        branches = Branches(path=find_role(gm, "path"))
    sights = read_sights(gm, ctx, position, before=found[0]) if found else None
    metadata = (slot, row, position if sights is None else sights.last, table)
    return page_markers(gm, ctx, found, "target", metadata, branches=branches, sights=sights)


@dataclass(kw_only=True)
class Branches:
    """Tokens that see keys of the call, by `path`, before those of the cache end."""

    path: fx.Node  # int32 [B, S, P]
    first: fx.Node | None = None  # int32 [B, S]: of rows of a block, see `paged_attention`
    earlier: dict[int, tuple[fx.Node, fx.Node | None]] = field(default_factory=dict)
    """By layer, keys and values of calls before, which the paths count first; kept up to date."""


def page_markers(
    gm: fx.GraphModule,
    ctx: PassContext,
    markers: list[fx.Node],
    owner: str,
    metadata: Metadata,
    *,
    block_size: int | None = None,
    layers: Sequence[int] | None = None,
    branches: Branches | None = None,
    sights: Sights | None = None,
) -> int:
    """Rewrite `markers`, one per layer in order, onto the caches of `owner`.

    A layer whose values are the beginning of its keys has a cache of keys alone.

    Args:
        metadata: slot, row, position and block table nodes of these markers' tokens; tokens with
            slot -1 write nothing.
        layers: the layer whose cache each marker uses; None: 0, 1, ...
        block_size: block size of the markers' own KV group; None: the program's.
        branches: of nodes of a tree; None: all keys are in the caches.
        sights: where tokens see later ones; None: they do not.
    """
    config = ctx.config
    shape_of_blocks, shared = (config.num_blocks, config.block_size), metadata
    numbers = range(len(markers)) if layers is None else layers
    for layer, marker in zip(numbers, markers, strict=True):
        query, key, value, scale, window, softcap, sinks, *chunk = marker.args
        if block_size is not None:
            group = KVGroup(block_size=block_size, window=int(str(window)))
            metadata = group_metadata(gm, ctx, group, shared, before=marker)
            shape_of_blocks = (group.num_blocks(config), block_size)
        value_dim = leading_part(value, key)
        halves = (("key", key),) if value_dim else (("key", key), ("value", value))
        caches: list[fx.Node | None] = [
            cache_of(gm, ctx, f"{owner}.{layer}.{half}", tensor, shape_of_blocks)
            for half, tensor in halves
        ]
        if value_dim:
            value = None
            caches.append(None)
        extra: tuple[int | fx.Node, ...] = (value_dim,) if value_dim else ()
        if branches is not None:
            key, value = _with_earlier(gm, branches, layer, key, value, before=marker)
            extra = (value_dim, branches.path)
            if branches.first is not None:
                extra = (*extra, branches.first)
        if sights is not None and int(str(window)) > 0:
            extra = (value_dim, sights.path, sights.first(gm, int(str(window)), marker))
        if chunk:
            if branches is not None or sights is not None:
                raise NotSupported(
                    f"attention in chunks of {chunk[0]} tokens ({module_path(marker)}) does not go "
                    "with draft_tree= or with images yet: leave them out"
                )
            position = metadata[2]
            extra = (value_dim, *emit(gm, begin_of_chunk, position, before=marker, size=chunk[0]))
        with gm.graph.inserting_before(marker):
            paged = gm.graph.call_function(
                torch.ops.compilespec.paged_attention.default,
                (
                    query, key, value, *caches, *metadata, scale, window, softcap, sinks, *extra,
                ),
            )  # fmt: skip
        paged.meta = dict(marker.meta)
        copy_origin(marker, paged)
        marker.replace_all_uses_with(paged)
        gm.graph.erase_node(marker)
    return len(markers)


def begin_of_chunk(position_BS: Any, *, size: int) -> tuple[Any, Any]:
    """Paths of no tokens, and the first position of each token's chunk."""
    none_BS1 = torch.full_like(position_BS, -1).unsqueeze(2)
    return none_BS1, position_BS - position_BS % size


def _with_earlier(
    gm: fx.GraphModule, branches: Branches, layer: int, *new: object, before: fx.Node
) -> tuple[fx.Node, fx.Node | None]:
    """Keys and values (None of latents) of a layer, those of the calls before first."""
    known = branches.earlier.get(layer)
    if known is not None:
        new = tuple(
            None if part is None else emit(
                gm, lambda *parts: torch.cat(parts, 2), old, part, before=before
            )
            for old, part in zip(known, new, strict=True)
        )  # fmt: skip
    branches.earlier[layer] = new  # type: ignore[assignment]
    return branches.earlier[layer]


def leading_part(value: object, key: object) -> int:
    """How many of a key's first numbers the value is; 0 if it is something else."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return 0
    source, index = value.args
    width = (shape_of(value) or (None,))[-1]
    is_first = source is key and index == (Ellipsis, slice(None, width, None))
    return int(width) if is_first and isinstance(width, int) else 0


def cache_of(
    gm: fx.GraphModule, ctx: PassContext, name: str, tensor: object, blocks: tuple[int, int]
) -> fx.Node:
    """The cache `cache.<name>` of keys or values, [B, N, S, H], made on first use."""
    shape = tensor.meta.get("example") if isinstance(tensor, fx.Node) else None
    if shape is None or len(shape[0]) != 4:
        raise PassError(f"cache.{name}: its attention marker has no known [B, N, T, H] shape")
    _, heads, _, head_dim = shape[0]
    buffer = BufferSpec(
        name=f"cache.{name}",
        kind="cache",
        shape=(*blocks, int(heads or 0), int(head_dim or 0)),
        dtype=shape[1],
        order=HEADS_FIRST if ctx.heads_first else (),
    )
    if ctx.sharding is not None:
        buffer = ctx.sharding.own(buffer)
    if ctx.buffers.get(buffer.name, buffer) != buffer:
        raise PassError(
            f"{buffer.name} is {list(ctx.buffers[buffer.name].shape)}, a marker needs "
            f"{list(buffer.shape)}; a drafter on the target's cache must have its sizes"
        )
    return add_buffer(gm, ctx, buffer)
