"""Unrolls the drafter's passes into the step."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.passes.splice.draft_loops.combined import combine
from compilespec.passes.splice.evidence import note_confidence, note_evidence
from compilespec.passes.splice.sampling import keep_draft_probs
from compilespec.program import PAD


def splice_draft_loop(step: Splice) -> int:
    """Splice the draft loop of the method's kind, which makes the role `drafts`: int32 [B, K],
    padded with PAD to the largest K of the program if this graph's K is smaller.

    Returns: the number of drafter passes.  Numerics: exact.  Torch IR.
    """
    ctx, num_passes = step.ctx, 0
    loop = LOOPS[ctx.capabilities.kind]
    if ctx.drafts_now:
        num_passes = loop.splice(step)
        keep_draft_probs(step)
        note_confidence(step)
    elif loop.keep is not None:
        loop.keep(step)
    if not (loop.fills_rows and num_passes):
        _widen(step)
    if ctx.capabilities.combines and not ctx.is_replay:
        combine(step)
    note_evidence(step)
    return num_passes


def _widen(step: Splice) -> None:
    """Make `drafts` as wide as those of the largest K; PAD where there are none."""
    num_columns = step.config.num_row_tokens - step.config.num_verify_tokens
    drafts = step.find("drafts")
    if num_columns or drafts is None:
        step.roles.drafts = pad_columns(step.roles.row_index, drafts, num_columns=num_columns)


def num_drafter_passes(ctx: PassContext) -> int | None:
    """The number of passes that the loop must splice; None without a drafter."""
    if not ctx.has_drafter:
        return None
    return LOOPS[ctx.capabilities.kind].num_passes(ctx) if ctx.drafts_now else 0


def pad_columns(index_B: Tensor, drafts_BK: Tensor | None, *, num_columns: int) -> Tensor:
    """The drafts and `num_columns` of PAD, int32."""
    pad = torch.full_like(index_B.unsqueeze(1).expand(-1, num_columns), PAD, dtype=torch.int32)
    return pad if drafts_BK is None else torch.cat([drafts_BK, pad], 1)
