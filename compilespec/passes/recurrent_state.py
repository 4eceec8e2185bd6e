"""Gives recurrences and causal convolutions the states of their requests, which survive rejection.

A state row holds a recurrence's state after the first `absorbed` tokens of its request, and what
the few tokens after them gave; see `ops.recurrence`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer
from compilespec.passes.linears import copy_origin
from compilespec.program import BufferSpec, ProgramConfig, marker_kind, markers


@dataclass(frozen=True, kw_only=True, eq=False)
class StateMetadata:
    """What tells the tokens of a call apart: nodes of shape [B, S] or [1, T]."""

    row: fx.Node  # int32, -1: writes nothing
    position: fx.Node  # int32
    absorbed: fx.Node  # int32, tokens in the state of the token's request
    commits: fx.Node  # bool, whether the token cannot be rejected any more


def keep_states(gm: fx.GraphModule, ctx: PassContext, owner: str, metadata: StateMetadata) -> int:
    """Rewrite the recurrent markers of a graph, in order, onto the state rows of `owner`."""
    found = markers(gm, "recurrence", "causal_conv")
    number = {"recurrence": 0, "causal_conv": 0}
    for marker in found:
        kind = str(marker_kind(marker))
        name = f"{kind}.{owner}.{number[kind]}"
        number[kind] += 1
        rewrite = _keep_state if kind == "recurrence" else _keep_window
        rewrite(gm, ctx, marker, name, metadata)
    return len(found)


def _keep_state(
    gm: fx.GraphModule, ctx: PassContext, marker: fx.Node, name: str, at: StateMetadata
) -> None:
    query, key, value, decay, beta, kind = marker.args
    sizes = [_sizes(node, name) for node in (key, value, decay, *([] if beta is None else [beta]))]
    (_, key_dim), (heads, value_dim) = sizes[0], sizes[1]
    width = sum(map(math.prod, sizes))
    rows, dtype = ctx.config.max_batch_size + 1, _dtype(value)
    state = BufferSpec(
        name=f"{name}.state", kind="state", shape=(rows, heads, key_dim, value_dim), dtype=dtype
    )
    recent = BufferSpec(
        name=f"{name}.recent",
        kind="state",
        shape=(rows, num_kept_tokens(ctx.config), width),
        dtype=dtype,
    )
    buffers = [add_buffer(gm, ctx, buffer) for buffer in (state, recent)]
    metadata = (at.row, at.position, at.absorbed, at.commits)
    _replace(
        gm, marker, torch.ops.compilespec.cached_recurrence.default,
        (query, key, value, decay, beta, *buffers, *metadata, kind),
    )  # fmt: skip


def _keep_window(
    gm: fx.GraphModule, ctx: PassContext, marker: fx.Node, name: str, at: StateMetadata
) -> None:
    x, weight, bias = marker.args
    (channels,) = _sizes(x, name)
    width = _shape(weight, name)[-1]
    recent = BufferSpec(
        name=f"{name}.recent",
        kind="state",
        shape=(
            ctx.config.max_batch_size + 1,
            int(width or 0) - 1 + num_kept_tokens(ctx.config),
            channels,
        ),
        dtype=_dtype(x),
    )
    ring = add_buffer(gm, ctx, recent)
    _replace(
        gm, marker, torch.ops.compilespec.cached_conv.default,
        (x, weight, bias, ring, at.row, at.position),
    )  # fmt: skip


def num_kept_tokens(config: ProgramConfig) -> int:
    """Tokens that a step may leave behind which the next one may reject: K of the largest step."""
    return max(1, config.num_row_tokens - 1)


def _replace(gm: fx.GraphModule, marker: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with gm.graph.inserting_before(marker):
        kept = gm.graph.call_function(target, args)
    kept.meta = dict(marker.meta)
    copy_origin(marker, kept)
    marker.replace_all_uses_with(kept)
    gm.graph.erase_node(marker)


def _shape(node: object, name: str) -> tuple[int | None, ...]:
    example = node.meta.get("example") if isinstance(node, fx.Node) else None
    if example is None:
        raise PassError(f"{name}: an argument of the marker has no known shape")
    shape: tuple[int | None, ...] = example[0]
    return shape


def _sizes(node: object, name: str) -> tuple[int, ...]:
    """The sizes of one token."""
    return tuple(int(size or 0) for size in _shape(node, name)[2:])


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["example"][1]
    return dtype
