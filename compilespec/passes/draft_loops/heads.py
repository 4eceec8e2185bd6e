"""Drafting by heads: each gives one draft, all of the same hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.direct import newest_hidden
from compilespec.passes.draft_loops.levels import Chosen
from compilespec.passes.draft_loops.recycled import next_position
from compilespec.passes.draft_loops.tree import Logits, grow_levels
from compilespec.passes.graph import emit, output_node, splice
from compilespec.passes.sampling import draft_token


def heads(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splice head i, "propose.i", on the target's taps at the last committed row, for draft i + 1.

    Nothing is written to a cache, and nothing is kept for the next step.  Makes the role `drafts`
    ([B, K], int32), and `parents` where they are a tree.  Torch IR.
    Source: Cai et al. 2024 (Medusa).
    """
    hidden, newest = newest_hidden(gm, ctx), next_position(gm, ctx)
    if ctx.config.tree is not None:
        return 1 + _grow(gm, ctx, hidden, newest)
    drafts = []
    for number in range(1, ctx.config.num_draft_tokens + 1):
        proposal = splice(gm, ctx, ctx.draft[f"propose.{number - 1}"], {"head_input": hidden})
        drafts.append(draft_token(gm, ctx, proposal, newest, number))
    stacked = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=output_node(gm))
    stacked.meta["role"] = "drafts"
    return len(drafts)


def _grow(gm: fx.GraphModule, ctx: PassContext, hidden: fx.Node, newest: fx.Node) -> int:
    """A tree: what head i gives for depth i + 1 is the same after every node."""
    end = output_node(gm)

    def follow(depth: int, level: Chosen | None) -> Logits:
        call = ctx.draft[f"propose.{depth - 1}"]
        _, logits, *ids = splice(gm, ctx, call, {"head_input": hidden})
        if level is not None:
            logits = emit(gm, after_each, logits, before=end, num_nodes=level.num)
        return logits, ids[0] if ids else None

    drawn = emit(gm, lambda newest_B: newest_B + 1, newest, before=end)
    return grow_levels(gm, ctx, drawn, follow)


def after_each(logits_BV: Any, *, num_nodes: int) -> Any:
    """The same logits for each of a level's nodes: [B * F, V]."""
    return logits_BV.repeat_interleave(num_nodes, 0)
