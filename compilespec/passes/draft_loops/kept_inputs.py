"""Steps of K = 0 draft nothing but keep the drafter's inputs; `replay` runs the drafter later.

Without this, a drafter with its own cache could not be used again after plain steps, which leave
holes in that cache.  Source: hazard H-23.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.windowed import argument_width
from compilespec.passes.graph import (
    add_buffer,
    add_input,
    arange_like,
    emit,
    find_role,
    output_node,
)
from compilespec.passes.read_state import block_table, lengths_of_rows, place
from compilespec.program import NUM_KEPT, BufferSpec, InputSpec

READ_BY_REPLAY = frozenset({"seq_len_R", "kept_aux_RWE", "kept_ids_RW", "context_RL"})


def keep_inputs(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Write each request's pair (hidden state, next token) of this step into its ring."""
    emit(
        gm, write_pair, *kept(gm, ctx), find_role(gm, "row_index"), find_role(gm, "start"),
        find_role(gm, "aux"), find_role(gm, "draft_ids"), before=output_node(gm),
    )  # fmt: skip


def read_kept(gm: fx.GraphModule, ctx: PassContext) -> int:
    """The pairs of the last `backlog_B` positions as inputs of a recycled loop, NUM_KEPT rows.

    Makes the roles that `recycled` reads; rows beyond a request's backlog write nothing.  Numerics:
    exact.  Torch IR.
    """
    config, end = ctx.config, output_node(gm)
    rows, backlog, lengths, table = (
        add_input(gm, ctx, InputSpec(name="row_B", kind="batch")),
        add_input(gm, ctx, InputSpec(name="backlog_B", kind="batch")),
        add_buffer(gm, ctx, lengths_of_rows(config)),
        add_buffer(gm, ctx, block_table(config)),
    )
    made = emit(
        gm, place_kept, rows, backlog, lengths, table, *kept(gm, ctx), before=end,
        max_seq_len=config.max_seq_len, block_size=config.block_size,
        spare_row=config.max_batch_size,
    )  # fmt: skip
    roles = (
        "aux", "draft_ids", "position", "row", "slot", "row_index", "live", "start", "num_emitted",
    )  # fmt: skip
    for role, node in zip(roles, made, strict=True):
        node.meta["role"] = role
    return 1


def kept(gm: fx.GraphModule, ctx: PassContext) -> tuple[fx.Node, fx.Node]:
    """The rings: position p in column p % NUM_KEPT."""
    config = ctx.config
    rows = (config.max_batch_size + 1, NUM_KEPT)  # the last row is spare
    width = argument_width(ctx.draft["combine"], "aux")
    hidden = BufferSpec(name="kept_aux_RWE", kind="state", shape=(*rows, width), dtype=config.dtype)
    ids = BufferSpec(name="kept_ids_RW", kind="state", shape=rows, dtype=torch.int32)
    return add_buffer(gm, ctx, hidden), add_buffer(gm, ctx, ids)


def write_pair(
    kept_aux_RWE: Any, kept_ids_RW: Any, index_B: Any, start_B: Any, aux_B1E: Any, ids_B1: Any
) -> Any:
    column_B = (start_B % NUM_KEPT).long()
    kept_aux_RWE.index_put_((index_B, column_B), aux_B1E[:, 0])
    return kept_ids_RW.index_put_((index_B, column_B), ids_B1[:, 0])


def place_kept(
    row_B: Any, backlog_B: Any, seq_len_R: Any, block_table_RM: Any, kept_aux_RWE: Any,
    kept_ids_RW: Any, *, max_seq_len: int, block_size: int, spare_row: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Row w of a request is position seq_len - backlog + w; its drafts follow the last one."""
    live_B = row_B >= 0
    index_B = torch.where(live_B, row_B, spare_row).long()
    start_B = (seq_len_R[index_B] - backlog_B).clamp(min=0)
    offset_W = arange_like(row_B, NUM_KEPT)
    wanted_BW = start_B.unsqueeze(1) + offset_W
    due_BW = live_B.unsqueeze(1) & (offset_W < backlog_B.unsqueeze(1))
    position, row, slot = place(
        wanted_BW, torch.where(due_BW, row_B.unsqueeze(1), -1), index_B.unsqueeze(1), due_BW,
        block_table_RM, max_seq_len=max_seq_len, block_size=block_size,
    )  # fmt: skip
    column_BW = (wanted_BW % NUM_KEPT).long()
    aux_BWE = kept_aux_RWE[index_B.unsqueeze(1), column_BW]
    ids_BW = kept_ids_RW[index_B.unsqueeze(1), column_BW]
    count_B = backlog_B.clamp(min=1, max=NUM_KEPT)
    return aux_BWE, ids_BW, position, row, slot, index_B, live_B, start_B, count_B
