"""Rejection: the ratio test with the residual distribution, which is lossless."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.acceptance.rule import acceptance_rule


@acceptance_rule(lossless=True)
def ratio_test(
    probs_BSV: Tensor,
    draft_probs_BKV: Tensor,
    draft_BK: Tensor,
    num_drafts_B: Tensor,
    uniform_BK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept a draft with probability min(1, target / draft probability); after the first
    rejection, draw from the residual distribution; after the last draft, from the target's.

    Returns:
        number of accepted drafts [B], and weights of the token after them [B, V].
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    count = draft_BK.shape[1]
    place_BK1 = draft_BK.clamp(min=0).long().unsqueeze(-1)
    target_BK = probs_BSV[:, :count].gather(-1, place_BK1).squeeze(-1)
    draft_prob_BK = draft_probs_BKV.gather(-1, place_BK1).squeeze(-1)
    is_judged_BK = torch.arange(count, device=draft_BK.device) < num_drafts_B.unsqueeze(1)
    is_kept_BK = (uniform_BK * draft_prob_BK < target_BK) & is_judged_BK
    kept_B = is_kept_BK.to(torch.int32).cumprod(1).sum(1).to(torch.int32)
    return kept_B, residual(probs_BSV, draft_probs_BKV, kept_B, num_drafts_B)


def residual(
    probs_BSV: Tensor,
    draft_probs_BKV: Tensor,
    kept_B: Tensor,
    num_drafts_B: Tensor,
    scale_B: Tensor | None = None,
) -> Tensor:
    """The positive part of scale * p - q at the row after the kept drafts, where its draft was
    judged; else p: weights [B, V].  Scale: 1 where it is None.
    """
    count, vocab = draft_probs_BKV.shape[1:]
    row_B1V = kept_B.long().view(-1, 1, 1).expand(-1, 1, vocab)
    target_BV = probs_BSV.gather(1, row_B1V).squeeze(1)
    draft_BV = draft_probs_BKV.gather(1, row_B1V.clamp(max=count - 1)).squeeze(1)
    scaled_BV = target_BV if scale_B is None else target_BV * scale_B.unsqueeze(1)
    is_refused_B1 = (kept_B < num_drafts_B).unsqueeze(1)
    return torch.where(is_refused_B1, (scaled_BV - draft_BV).clamp(min=0), target_BV)
