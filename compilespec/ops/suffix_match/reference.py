"""The definition of `suffix_match`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compilespec.program import PAD


def suffix_match_reference(
    history_BL: Tensor,
    length_B: Tensor,
    past_ML: Tensor,
    num_draft_tokens: int,
    max_match: int,
    min_match: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The K tokens that most often followed the longest context that occurred before.

    A place is a token of a past text, or of the request itself, and its match is how many tokens
    before it equal the request's newest ones, backwards, `max_match` at most.  The places with the
    longest match vote: the token that most of them go on with is the first draft, those that went
    on with it vote for the second one, and so on.  Of two tokens with equal votes the one that
    stands last wins; a request's own tokens stand behind all past texts.

    Args:
        history_BL: int32, each request's tokens, PAD from `length_B` (int32 or int64) on.
        past_ML: int32, M past texts, PAD behind each.
        min_match: the shortest match that counts, at least 1.
        vocab_size: greater than every id.
    Returns:
        int32 [B, K], PAD where no place votes; and int32 [B], the length of the match of those
        that vote, 0 if none does.
    Source: Oliaro et al. 2024, SuffixDecoding (votes along the longest match; here without a tree).
    """
    batch = history_BL.shape[0]
    past_N = nn.functional.pad(past_ML, (0, 1), value=PAD).flatten()  # no match runs into the next
    text_BN = torch.cat([past_N.expand(batch, -1), history_BL], 1).long()
    matched_BN = _matched(text_BN, history_BL, length_B, max_match)
    longest_B1 = matched_BN.amax(1, keepdim=True)
    votes_BN = (matched_BN == longest_B1) & (longest_B1 >= min_match)
    num_places = text_BN.shape[1]
    column_N = torch.arange(num_places, device=text_BN.device)
    drafts = []
    for k in range(num_draft_tokens):
        token_BN = nn.functional.pad(text_BN, (0, k), value=PAD)[:, k:]
        votes_BN = votes_BN & (token_BN >= 0)
        count_BV = torch.zeros((batch, vocab_size), dtype=torch.int64, device=text_BN.device)
        count_BV = count_BV.scatter_add(1, token_BN.clamp(min=0), votes_BN.long())
        count_BN = count_BV.gather(1, token_BN.clamp(min=0))
        score_BN = torch.where(votes_BN, count_BN * num_places + column_N, -1)
        best_B1 = score_BN.argmax(1, keepdim=True)
        is_found_B1 = score_BN.gather(1, best_B1) >= 0
        drafts.append(torch.where(is_found_B1, token_BN.gather(1, best_B1), PAD))
        votes_BN = votes_BN & (token_BN == drafts[-1])
    is_long_B1 = longest_B1 >= min_match
    matched_B = torch.where(is_long_B1, longest_B1, 0).squeeze(1)
    return torch.cat(drafts, 1).to(torch.int32), matched_B.to(torch.int32)


def _matched(text_BN: Tensor, history_BL: Tensor, length_B: Tensor, max_match: int) -> Tensor:
    """Count, for each place of a text, how many tokens just before it equal the last tokens of the
    history, going back without a gap; [B, N], 0 where there are no tokens.
    """
    length_B1 = length_B.long().unsqueeze(1)
    num_places = text_BN.shape[1]
    matched_BN = torch.zeros_like(text_BN)
    is_equal_BN = text_BN >= 0
    for back in range(1, max_match + 1):
        newest_B1 = history_BL.gather(1, (length_B1 - back).clamp(min=0)).long()
        before_BN = nn.functional.pad(text_BN, (back, 0), value=PAD)[:, :num_places]
        is_equal_BN = is_equal_BN & (before_BN == newest_B1) & (before_BN >= 0)
        is_equal_BN = is_equal_BN & (length_B1 >= back)
        matched_BN = matched_BN + is_equal_BN
    return matched_BN
