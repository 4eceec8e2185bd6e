"""Drafting by heads: each gives one draft, all of the same hidden state."""

from __future__ import annotations

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.direct import newest_hidden
from compilespec.passes.draft_loops.recycled import next_position
from compilespec.passes.graph import emit, output_node, splice
from compilespec.passes.sampling import draft_token


def heads(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splice head i, "propose.i", on the target's taps at the last committed row, for draft i + 1.

    Nothing is written to a cache, and nothing is kept for the next step.  Makes the role `drafts`
    ([B, K], int32).  Torch IR.  Source: Cai et al. 2024 (Medusa).
    """
    hidden, newest = newest_hidden(gm, ctx), next_position(gm, ctx)
    drafts = []
    for number in range(1, ctx.config.num_draft_tokens + 1):
        proposal = splice(gm, ctx, ctx.draft[f"propose.{number - 1}"], {"head_input": hidden})
        drafts.append(draft_token(gm, ctx, proposal, newest, number))
    stacked = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=output_node(gm))
    stacked.meta["role"] = "drafts"
    return len(drafts)
