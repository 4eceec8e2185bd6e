"""Drafting by heads: each gives one draft, all of the same hidden state."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.calls import newest_hidden, next_position, propose
from compilespec.passes.splice.draft_loops.tree import Logits, grow_by_depth
from compilespec.passes.splice.draft_loops.tree_parts import Chosen


def heads(step: Splice) -> int:
    """Splice head i, "propose.i", on the target's taps at the last committed row, for draft i + 1.

    Nothing is written to a cache, and nothing is kept for the next step.  Makes the role `drafts`
    ([B, K], int32), and `parents` where they are a tree.  Torch IR.
    Source: Cai et al. 2024 (Medusa).
    """
    hidden, newest = newest_hidden(step), next_position(step)
    if step.config.tree is not None:
        return 1 + _grow(step, hidden, newest)
    numbers = range(1, step.config.num_draft_tokens + 1)
    drafts = [propose(step, hidden, newest, i, call=f"propose.{i - 1}") for i in numbers]
    step.roles.drafts = torch.stack(drafts, 1)
    return len(drafts)


def _grow(step: Splice, hidden: Tensor, newest: Tensor) -> int:
    """A tree: what head i gives for depth i + 1 is the same after every node."""

    def follow(depth: int, nodes: Chosen | None) -> Logits:
        _, logits, *ids = step.fragment(f"propose.{depth - 1}", head_input=hidden)
        if nodes is not None:
            logits = after_each(logits, num_nodes=nodes.num)
        return logits, ids[0] if ids else None

    return grow_by_depth(step, newest + 1, follow)


def after_each(logits_BV: Tensor, *, num_nodes: int) -> Tensor:
    """The same logits for each of a depth's nodes: [B * F, V]."""
    return logits_BV.repeat_interleave(num_nodes, 0)
