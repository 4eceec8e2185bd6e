"""Steps of K = 0 draft nothing but keep the drafter's inputs; `replay` runs the drafter later.

Without this, a drafter with its own cache could not be used again after plain steps, which leave
holes in that cache.  Source: hazard H-23.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.windowed import argument_width
from compilespec.passes.splice.places import place
from compilespec.passes.splice.read_state import block_table, lengths_of_rows
from compilespec.program import NUM_KEPT, Traced

READ_BY_REPLAY = frozenset({"seq_len_R", "kept_aux_RWE", "kept_ids_RW", "context_RL"})
PLACED = ("position", "row", "slot", "row_index", "live", "start", "num_emitted")


def keep_inputs(step: Splice) -> None:
    """Write what the drafter would have read of this step into each request's rings: the next
    token, and the hidden state if it reads one.
    """
    roles = step.roles
    for role, ring in rings(step).items():
        made = roles.aux if role == "aux" else roles.target.clamp(min=0)
        write_ring(ring, roles.row_index, roles.start, made)


def read_kept(step: Splice) -> int:
    """The kept inputs of the last `backlog_B` positions as those of a draft loop, NUM_KEPT rows.

    Makes the roles that the loop reads; rows beyond a request's backlog write nothing.  A drafter
    that reads hidden states has token t+1 in slot t, another one in slot t+1.  Numerics: exact.
    Torch IR.
    """
    rows, backlog = step.batch("row_B"), step.batch("backlog_B")
    lengths, table = (
        step.buffer(lengths_of_rows(step.config)),
        step.buffer(block_table(step.config)),
    )
    kept, ahead = rings(step), 0 if reads_hidden(step.ctx.draft) else 1
    made = step.call(place_kept, rows, backlog, lengths, table, *kept.values(), ahead=ahead)
    for role, value in zip((*PLACED, *kept), made, strict=True):
        step.name(role, value)
    return 1


def reads_hidden(calls: Mapping[str, Traced]) -> bool:
    """True for a drafter that combines the target's hidden states, a row for each token."""
    return "combine" in calls


def rings(step: Splice) -> dict[str, Tensor]:
    """By role, what is kept: that of position p in column p % NUM_KEPT."""
    kept = {"draft_ids": step.state("kept_ids_RW", (NUM_KEPT,), torch.int32)}
    if reads_hidden(step.ctx.draft):
        width = argument_width(step.ctx.draft["combine"], "aux")
        kept["aux"] = step.state("kept_aux_RWE", (NUM_KEPT, width), step.config.dtype)
    return kept


def write_ring(ring: Tensor, index_B: Tensor, start_B: Tensor, made_B1: Tensor) -> Tensor:
    """`made_B1` is [B, 1] or [B, 1, E]."""
    return ring.index_put_((index_B, (start_B % NUM_KEPT).long()), made_B1[:, 0])


def place_kept(
    row_B: Tensor,
    backlog_B: Tensor,
    seq_len_R: Tensor,
    block_table_RM: Tensor,
    *rings: Tensor,
    ahead: int,
    max_seq_len: int,
    block_size: int,
    spare_row: int,
) -> tuple[Tensor, ...]:
    """The places of the last `backlog` kept inputs of each request, as the roles of `PLACED`, in
    that order, and the inputs of each ring.  Row w of a request is kept position seq_len - backlog
    + w, and belongs `ahead` positions after it; rows beyond the backlog have position 0, row -1 and
    slot -1.
    """
    live_B = row_B >= 0
    index_B = torch.where(live_B, row_B, spare_row).long()
    start_B = (seq_len_R[index_B] - backlog_B).clamp(min=0)
    offset_W = arange_like(row_B, NUM_KEPT)
    kept_BW = start_B.unsqueeze(1) + offset_W
    due_BW = live_B.unsqueeze(1) & (offset_W < backlog_B.unsqueeze(1))
    position, row, slot = place(
        kept_BW + ahead,
        torch.where(due_BW, row_B.unsqueeze(1), -1),
        index_B.unsqueeze(1),
        due_BW,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    column_BW = (kept_BW % NUM_KEPT).long()
    inputs = (ring[index_B.unsqueeze(1), column_BW] for ring in rings)
    count_B = backlog_B.clamp(min=1, max=NUM_KEPT)
    return position, row, slot, index_B, live_B, start_B, count_B, *inputs
