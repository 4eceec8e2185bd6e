"""The definition of `ngram_match`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compilespec.program import PAD


def ngram_match_reference(
    history_BL: Tensor, length_B: Tensor, num_draft_tokens: int, max_ngram: int, min_ngram: int
) -> tuple[Tensor, Tensor]:
    """The K tokens after the most recent earlier occurrence of the longest window of newest tokens
    (max_ngram .. min_ngram) that has one.

    Args:
        history_BL: int32, a request's tokens, PAD from `length_B` (int32 or int64) on.
    Returns:
        int32 [B, K], PAD past the newest token or if there is no match; and int32 [B], the tokens
        of the window that was found, 0 if none was.

    Column e of `matched` counts the tokens before e that equal the newest ones, backwards.
    """
    width = history_BL.shape[1]
    column_L = torch.arange(width, device=history_BL.device)
    length_B1 = length_B.long().unsqueeze(1)
    matched_BL = torch.zeros_like(history_BL)
    is_equal_BL = column_L < length_B1
    for back in range(1, max_ngram + 1):
        newest_B1 = history_BL.gather(1, (length_B1 - back).clamp(min=0))
        before_BL = nn.functional.pad(history_BL, (back, 0), value=PAD)[:, :width]
        is_equal_BL = is_equal_BL & (before_BL == newest_B1) & (before_BL >= 0)
        is_equal_BL = is_equal_BL & (length_B1 >= back)
        matched_BL = matched_BL + is_equal_BL
    score_BL = matched_BL * (width + 1) + column_L
    end_B1 = score_BL.argmax(1, keepdim=True)
    is_found_B1 = matched_BL.gather(1, end_B1) >= min_ngram
    wanted_BK = end_B1 + torch.arange(num_draft_tokens, device=history_BL.device)
    drafts_BK = history_BL.gather(1, wanted_BK.clamp(max=width - 1))
    matched_B = torch.where(is_found_B1, matched_BL.gather(1, end_B1), 0).squeeze(1)
    return torch.where(is_found_B1 & (wanted_BK < length_B1), drafts_BK, PAD), matched_B
