"""Turns attention markers into reads and writes of the block-paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer, find_role
from compilespec.passes.kv_groups import KVGroup, Metadata, group_metadata
from compilespec.passes.linears import copy_origin
from compilespec.program import BufferSpec, markers


def insert_paged_attention(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Marker -> `compilespec::paged_attention` with the layer's caches and this step's metadata.
    Numerics: rounding (the same sums over the same keys, in another order).  Runs on torch IR."""
    table = find_role(gm, "block_table_RM")
    metadata = (find_role(gm, "slot"), find_role(gm, "row"), find_role(gm, "position"), table)
    return page_markers(gm, ctx, markers(gm), "target", metadata)


def page_markers(
    gm: fx.GraphModule,
    ctx: PassContext,
    markers: list[fx.Node],
    owner: str,
    metadata: Metadata,
    *,
    block_size: int | None = None,
    layers: Sequence[int] | None = None,
) -> int:
    """Rewrite `markers`, one per layer in order, onto the caches of `owner`.

    Args:
        metadata: slot, row, position and block table nodes of these markers' tokens; tokens with
            slot -1 write nothing.
        layers: the layer whose cache each marker uses; None: 0, 1, ...
        block_size: block size of the markers' own KV group; None: the program's.
    """
    config = ctx.config
    shape_of_blocks, shared = (config.num_blocks, config.block_size), metadata
    numbers = range(len(markers)) if layers is None else layers
    for layer, marker in zip(numbers, markers, strict=True):
        query, key, value, scale, window, softcap, sinks = marker.args
        if block_size is not None:
            group = KVGroup(block_size=block_size, window=int(str(window)))
            metadata = group_metadata(gm, ctx, group, shared, before=marker)
            shape_of_blocks = (group.num_blocks(config), block_size)
        caches = []
        for half, tensor in (("key", key), ("value", value)):
            shape = tensor.meta.get("example") if isinstance(tensor, fx.Node) else None
            if shape is None or len(shape[0]) != 4:
                raise PassError(
                    f"layer {layer}: the {half} of an attention marker has no known [B, N, T, H] "
                    f"shape"
                )
            _, heads, _, head_dim = shape[0]
            buffer = BufferSpec(
                name=f"cache.{owner}.{layer}.{half}",
                kind="cache",
                shape=(*shape_of_blocks, int(heads or 0), int(head_dim or 0)),
                dtype=shape[1],
            )
            if ctx.buffers.get(buffer.name, buffer) != buffer:
                raise PassError(
                    f"{buffer.name} is {list(ctx.buffers[buffer.name].shape)}, a marker needs "
                    f"{list(buffer.shape)}; a drafter on the target's cache must have its sizes"
                )
            caches.append(add_buffer(gm, ctx, buffer))
        with gm.graph.inserting_before(marker):
            paged = gm.graph.call_function(
                torch.ops.compilespec.paged_attention.default,
                (query, key, value, *caches, *metadata, scale, window, softcap, sinks),
            )
        paged.meta = dict(marker.meta)
        copy_origin(marker, paged)
        marker.replace_all_uses_with(paged)
        gm.graph.erase_node(marker)
    return len(markers)
