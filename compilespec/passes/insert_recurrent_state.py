"""Turns recurrence and convolution markers into operators on the states of the requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops import LOOPS
from compilespec.passes.graph import (
    add_buffer,
    add_input,
    arange_like,
    emit,
    find_role,
    output_node,
)
from compilespec.passes.recurrent_state import StateMetadata, keep_states
from compilespec.program import BufferSpec, InputSpec, ProgramConfig, markers


def insert_recurrent_state(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Marker -> `compilespec::cached_recurrence` or `cached_conv` with the layer's state rows.

    A decode step commits its first token, which the step before emitted; its drafts may be
    rejected.  A prefill call commits all its tokens but those that the next chunk runs again.
    Makes the roles `absorbed` and `commits`, and counts the tokens that the states hold in
    `absorbed_R`.  Numerics: rounding (transformers divides a sequence into chunks).  Torch IR.
    """
    metadata = _decode(gm, ctx) if ctx.phase == "decode" else _prefill(gm, ctx)
    metadata.absorbed.meta["role"], metadata.commits.meta["role"] = "absorbed", "commits"
    return keep_states(gm, ctx, "target", metadata)


def _decode(gm: fx.GraphModule, ctx: PassContext) -> StateMetadata:
    config, row, position = ctx.config, find_role(gm, "row"), find_role(gm, "position")
    counts, index, start = _counts(gm, ctx), find_role(gm, "row_index"), find_role(gm, "start")
    absorbed, commits = emit(
        gm, _decode_metadata, counts, index, position, before=_first_marker(gm),
        num_tokens=config.num_verify_tokens,
    )  # fmt: skip
    emit(
        gm, _count_first, counts, index, start, before=output_node(gm),
        max_seq_len=config.max_seq_len,
    )  # fmt: skip
    return StateMetadata(row=row, position=position, absorbed=absorbed, commits=commits)


def _decode_metadata(
    absorbed_R: Any, index_B: Any, position_BS: Any, *, num_tokens: int
) -> tuple[Any, Any]:
    place_S = arange_like(position_BS, num_tokens)
    absorbed_BS = absorbed_R[index_B].unsqueeze(1) + torch.zeros_like(position_BS)
    return absorbed_BS, (place_S < 1).unsqueeze(0) & (position_BS >= 0)


def _count_first(absorbed_R: Any, index_B: Any, start_B: Any, *, max_seq_len: int) -> Any:
    return absorbed_R.index_put_((index_B,), (start_B + 1).clamp(max=max_seq_len))


def _prefill(gm: fx.GraphModule, ctx: PassContext) -> StateMetadata:
    row, position = find_role(gm, "row"), find_role(gm, "position")
    counts, owner = _counts(gm, ctx), add_input(gm, ctx, InputSpec(name="owner_T", kind="batch"))
    loop, config = LOOPS[ctx.capabilities.kind], ctx.config
    absorbed, commits, index, end = emit(
        gm, _prefill_metadata, counts, row, position, owner, find_role(gm, "live"),
        find_role(gm, "start"), before=_first_marker(gm), spare_row=config.max_batch_size,
        num_repeated=loop.num_repeated_tokens(config.num_row_tokens - 1),
    )  # fmt: skip
    emit(
        gm, lambda absorbed_R, index_T, end_T: absorbed_R.index_put_((index_T,), end_T),
        counts, index, end, before=output_node(gm),
    )  # fmt: skip
    return StateMetadata(row=row, position=position, absorbed=absorbed, commits=commits)


def _prefill_metadata(
    absorbed_R: Any, row_1T: Any, position_1T: Any, owner_T: Any, live_R: Any, start_R: Any, *,
    spare_row: int, num_repeated: int,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Where the last call of a prompt ends, the next one begins: `num_repeated` tokens earlier,
    unless the prompt ended, too.
    """
    index_1T = torch.where(row_1T >= 0, row_1T, spare_row).long()
    end_R = torch.where(live_R, start_R, (start_R - num_repeated).clamp(min=0))
    end_1T = end_R[owner_T.long()].unsqueeze(0)
    return absorbed_R[index_1T], position_1T < end_1T, index_1T.squeeze(0), end_1T.squeeze(0)


def _first_marker(gm: fx.GraphModule) -> fx.Node:
    return markers(gm, "recurrence", "causal_conv")[0]


def _counts(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    return add_buffer(gm, ctx, absorbed_tokens(ctx.config))


def absorbed_tokens(config: ProgramConfig) -> BufferSpec:
    """Tokens of each row's request that the states of the target's recurrent layers hold."""
    shape = (config.max_batch_size + 1,)  # the last row is spare
    return BufferSpec(name="absorbed_R", kind="state", shape=shape, dtype=torch.int32)
