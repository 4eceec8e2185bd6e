"""Steps of K = 0 draft nothing but keep the drafter's inputs; `replay` runs the drafter later.

Without this, a drafter with its own cache could not be used again after plain steps, which leave
holes in that cache.  Source: hazard H-23.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.windowed import argument_width
from compilespec.passes.splice.places import place
from compilespec.passes.splice.read_state import block_table, lengths_of_rows
from compilespec.program import NUM_KEPT

READ_BY_REPLAY = frozenset({"seq_len_R", "kept_aux_RWE", "kept_ids_RW", "context_RL"})
MADE = ("aux", "draft_ids", "position", "row", "slot", "row_index", "live", "start", "num_emitted")


def keep_inputs(step: Splice) -> None:
    """Write each request's pair (hidden state, next token) of this step into its ring."""
    roles = step.roles
    write_pair(*kept(step), roles.row_index, roles.start, roles.aux, roles.draft_ids)


def read_kept(step: Splice) -> int:
    """The pairs of the last `backlog_B` positions as inputs of a recycled loop, NUM_KEPT rows.

    Makes the roles that `recycled` reads; rows beyond a request's backlog write nothing.  Numerics:
    exact.  Torch IR.
    """
    rows, backlog = step.batch("row_B"), step.batch("backlog_B")
    lengths, table = (
        step.buffer(lengths_of_rows(step.config)),
        step.buffer(block_table(step.config)),
    )
    made = step.call(place_kept, rows, backlog, lengths, table, *kept(step))
    for role, value in zip(MADE, made, strict=True):
        step.name(role, value)
    return 1


def kept(step: Splice) -> tuple[Tensor, Tensor]:
    """The rings: position p in column p % NUM_KEPT."""
    width = argument_width(step.ctx.draft["combine"], "aux")
    hidden = step.state("kept_aux_RWE", (NUM_KEPT, width), step.config.dtype)
    return hidden, step.state("kept_ids_RW", (NUM_KEPT,), torch.int32)


def write_pair(
    kept_aux_RWE: Tensor,
    kept_ids_RW: Tensor,
    index_B: Tensor,
    start_B: Tensor,
    aux_B1E: Tensor,
    ids_B1: Tensor,
) -> Tensor:
    column_B = (start_B % NUM_KEPT).long()
    kept_aux_RWE.index_put_((index_B, column_B), aux_B1E[:, 0])
    return kept_ids_RW.index_put_((index_B, column_B), ids_B1[:, 0])


def place_kept(
    row_B: Tensor,
    backlog_B: Tensor,
    seq_len_R: Tensor,
    block_table_RM: Tensor,
    kept_aux_RWE: Tensor,
    kept_ids_RW: Tensor,
    *,
    max_seq_len: int,
    block_size: int,
    spare_row: int,
) -> tuple[Tensor, ...]:
    """The last `backlog` kept pairs of each request and their places, as the roles of `MADE`, in
    that order.  Row w of a request is position seq_len - backlog + w; rows beyond the backlog have
    position 0, row -1 and slot -1.
    """
    live_B = row_B >= 0
    index_B = torch.where(live_B, row_B, spare_row).long()
    start_B = (seq_len_R[index_B] - backlog_B).clamp(min=0)
    offset_W = arange_like(row_B, NUM_KEPT)
    wanted_BW = start_B.unsqueeze(1) + offset_W
    due_BW = live_B.unsqueeze(1) & (offset_W < backlog_B.unsqueeze(1))
    position, row, slot = place(
        wanted_BW,
        torch.where(due_BW, row_B.unsqueeze(1), -1),
        index_B.unsqueeze(1),
        due_BW,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    column_BW = (wanted_BW % NUM_KEPT).long()
    aux_BWE = kept_aux_RWE[index_B.unsqueeze(1), column_BW]
    ids_BW = kept_ids_RW[index_B.unsqueeze(1), column_BW]
    count_B = backlog_B.clamp(min=1, max=NUM_KEPT)
    return aux_BWE, ids_BW, position, row, slot, index_B, live_B, start_B, count_B
