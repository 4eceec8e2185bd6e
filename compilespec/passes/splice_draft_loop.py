"""Unrolls the drafter's passes into the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops import LOOPS
from compilespec.passes.graph import emit, find_role, output_node
from compilespec.passes.sampling import keep_draft_probs
from compilespec.program import PAD


def splice_draft_loop(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splice the draft loop of the method's kind, which makes the role `drafts`: int32 [B, K],
    padded with PAD to the largest K of the program if this graph's K is smaller.

    Returns: the number of drafter passes.  Numerics: exact.  Torch IR.
    """
    loop, config = LOOPS[ctx.capabilities.kind], ctx.config
    num_passes = 0
    drafts: tuple[fx.Node, ...] = ()
    if config.num_draft_tokens:
        num_passes = loop.splice(gm, ctx)
        keep_draft_probs(gm, ctx)
        if loop.fills_rows or config.num_row_tokens == config.num_verify_tokens:
            return num_passes
        drafts = (find_role(gm, "drafts"),)
        del drafts[0].meta["role"]
    elif loop.keep is not None:
        loop.keep(gm, ctx)
    wide = emit(
        gm, pad_columns, find_role(gm, "row_index"), *drafts, before=output_node(gm),
        num_columns=config.num_row_tokens - config.num_verify_tokens,
    )  # fmt: skip
    wide.meta["role"] = "drafts"
    return num_passes


def num_drafter_passes(ctx: PassContext) -> int | None:
    """The number of passes that the loop must splice; None without a drafter."""
    if not ctx.has_drafter:
        return None
    return LOOPS[ctx.capabilities.kind].num_passes(ctx) if ctx.config.num_draft_tokens else 0


def pad_columns(index_B: Any, *drafts_BK: Any, num_columns: int) -> Any:
    """The drafts and `num_columns` of PAD, int32."""
    pad = torch.full_like(index_B.unsqueeze(1).expand(-1, num_columns), PAD, dtype=torch.int32)
    return torch.cat([*drafts_BK, pad], 1) if drafts_BK else pad
