"""Strict: a draft is accepted where it is the target's own choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.acceptance.base import Judged, Rule
from compilespec.passes.graph import arange_like, emit, find_role, output_node
from compilespec.passes.runner import PassContext
from compilespec.program import PAD


def decode(gm: fx.GraphModule, ctx: PassContext, ids: fx.Node, logits: fx.Node) -> Judged:
    count, end = ctx.config.num_draft_tokens, output_node(gm)
    return Judged(*emit(gm, accept_greedy, ids, logits, before=end, num_draft_tokens=count))


def prefill(gm: fx.GraphModule, ctx: PassContext, logits: fx.Node) -> Judged:
    live = find_role(gm, "live")
    return Judged(*emit(gm, first_token, logits, live, before=output_node(gm)))


def accept_greedy(ids_BS: Any, logits_BSV: Any, *, num_draft_tokens: int) -> tuple[Any, Any, Any]:
    """Keep the longest matching prefix of each draft and add the bonus token.

    Args:
        ids_BS: int32, the last emitted token and the K drafts; logits_BSV: position i judges draft
        i.
    Returns:
        target_BS (int32 argmax, first index wins ties), emitted_BS (int32, PAD after the bonus),
        num_emitted_B
        (int32, accepted drafts + 1).
    Source: requirements I11, M9.  Worked example: drafts 5 6 7, target 5 9 7 8 gives 5 9.
    """
    target_BS = logits_BSV.argmax(-1).to(torch.int32)
    match_BK = ids_BS[:, 1:] == target_BS[:, :num_draft_tokens]
    count_B = match_BK.to(torch.int32).cumprod(1).sum(1).to(torch.int32) + 1
    emitted_BS = torch.where(
        arange_like(target_BS, num_draft_tokens + 1) < count_B.unsqueeze(1), target_BS, PAD
    )
    return target_BS, emitted_BS, count_B


def first_token(logits_1RV: Any, live_R: Any) -> tuple[Any, Any, Any]:
    """Prefill: one token a finished prompt, PAD for the others."""
    target_R1 = logits_1RV.squeeze(0).argmax(-1, keepdim=True).to(torch.int32)
    emitted_R1 = torch.where(live_R.unsqueeze(1), target_R1, PAD)
    return target_R1, emitted_R1, live_R.to(torch.int32)


RULE = Rule(lossless=True, decode=decode, prefill=prefill)
