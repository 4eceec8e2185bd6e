"""Unrolls the drafter's passes into the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops import LOOPS
from compilespec.passes.draft_loops.combined import combine
from compilespec.passes.evidence import note_evidence, note_level
from compilespec.passes.graph import emit, find_role, has_role, output_node
from compilespec.passes.sampling import keep_draft_probs
from compilespec.program import PAD


def splice_draft_loop(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splice the draft loop of the method's kind, which makes the role `drafts`: int32 [B, K],
    padded with PAD to the largest K of the program if this graph's K is smaller.

    Returns: the number of drafter passes.  Numerics: exact.  Torch IR.
    """
    loop, num_passes = LOOPS[ctx.capabilities.kind], 0
    if ctx.drafts_now:
        num_passes = loop.splice(gm, ctx)
        keep_draft_probs(gm, ctx)
        note_level(gm)
    elif loop.keep is not None:
        loop.keep(gm, ctx)
    if not (loop.fills_rows and num_passes):
        _widen(gm, ctx)
    if ctx.capabilities.combines and not ctx.read_only:
        combine(gm, ctx)
    note_evidence(gm, ctx)
    return num_passes


def _widen(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Make `drafts` as wide as those of the largest K; PAD where there are none."""
    num_columns = ctx.config.num_row_tokens - ctx.config.num_verify_tokens
    drafts: tuple[fx.Node, ...] = ()
    if has_role(gm, "drafts"):
        if not num_columns:
            return
        drafts = (find_role(gm, "drafts"),)
        del drafts[0].meta["role"]
    wide = emit(
        gm, pad_columns, find_role(gm, "row_index"), *drafts, before=output_node(gm),
        num_columns=num_columns,
    )  # fmt: skip
    wide.meta["role"] = "drafts"


def num_drafter_passes(ctx: PassContext) -> int | None:
    """The number of passes that the loop must splice; None without a drafter."""
    if not ctx.has_drafter:
        return None
    return LOOPS[ctx.capabilities.kind].num_passes(ctx) if ctx.drafts_now else 0


def pad_columns(index_B: Any, *drafts_BK: Any, num_columns: int) -> Any:
    """The drafts and `num_columns` of PAD, int32."""
    pad = torch.full_like(index_B.unsqueeze(1).expand(-1, num_columns), PAD, dtype=torch.int32)
    return torch.cat([*drafts_BK, pad], 1) if drafts_BK else pad
