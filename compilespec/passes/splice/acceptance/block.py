"""Block verification: judges the drafts of a step together, which is lossless and accepts more
drafts than judging them one after the other.

It follows the contract of `compilespec.acceptance_rule`: an example for a user's own rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.acceptance.rejection import residual
from compilespec.passes.splice.acceptance.rule import acceptance_rule


@acceptance_rule(lossless=True)
def block_verification(
    probs_BSV: Tensor,
    draft_probs_BKV: Tensor,
    draft_BK: Tensor,
    num_drafts_B: Tensor,
    uniform_BK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix i whose uniform number is at most h_i; it may be longer than a
    prefix that fails.

    w_i = min(1, w_{i-1} p(x_i) / q(x_i)), w_0 = 1; h_i = r_i / (r_i + 1 - w_i) with r_i the sum of
    the positive part of w_i p_i - q_i over the next token, and h = w at the last draft.  The next
    token is drawn from the positive part of w p - q.

    Source: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2.
    """
    count = draft_BK.shape[1]
    place_BK1 = draft_BK.clamp(min=0).long().unsqueeze(-1)
    target_BK = probs_BSV[:, :count].gather(-1, place_BK1).squeeze(-1)
    draft_prob_BK = draft_probs_BKV.gather(-1, place_BK1).squeeze(-1)
    ratio_BK = torch.where(draft_prob_BK > 0, target_BK / draft_prob_BK, 0)
    weight = torch.ones_like(ratio_BK[:, 0])
    kept_B, weight_kept_B = torch.zeros_like(num_drafts_B), torch.ones_like(weight)
    for i in range(1, count + 1):
        weight = (weight * ratio_BK[:, i - 1]).clamp(max=1)
        accept = weight
        if i < count:
            excess_B = (weight.unsqueeze(1) * probs_BSV[:, i] - draft_probs_BKV[:, i]).clamp(min=0)
            rest = excess_B.sum(-1)
            whole = rest + (1 - weight)
            before_last = torch.where(whole > 0, rest / whole, weight)  # w is 1 where whole is 0
            accept = torch.where(num_drafts_B == i, weight, before_last)
        is_kept = (uniform_BK[:, i - 1] < accept) & (i <= num_drafts_B)
        kept_B = torch.where(is_kept, i, kept_B)
        weight_kept_B = torch.where(is_kept, weight, weight_kept_B)
    return kept_B, residual(probs_BSV, draft_probs_BKV, kept_B, num_drafts_B, weight_kept_B)
