"""suffix_match in Triton: one program per request, which counts votes in its own table."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def suffix_match(
    history_BL: Tensor,
    length_B: Tensor,
    past_ML: Tensor,
    num_draft_tokens: int,
    max_match: int,
    min_match: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """See `suffix_match_reference`."""
    batch, width = history_BL.shape
    num_past, past_width = past_ML.shape
    drafts_BK = history_BL.new_empty((batch, num_draft_tokens))
    matched_B = history_BL.new_empty((batch,))
    num_places = num_past * past_width + width
    match_BN = history_BL.new_empty((batch, num_places))
    votes_BV = history_BL.new_zeros((batch, vocab_size))
    if batch:
        suffix_kernel[(batch,)](
            history_BL.contiguous(), length_B.contiguous(), past_ML.contiguous(), match_BN,
            votes_BV, drafts_BK, matched_B, width, num_past * past_width, max(past_width, 1),
            vocab_size,
            NUM_DRAFTS=num_draft_tokens, MAX_MATCH=max_match, MIN_MATCH=min_match, BLOCK=1024,
            num_warps=8,
        )  # fmt: skip
    return drafts_BK, matched_B


@triton.jit
def token_at(place, ahead, history_ptr, past_ptr, width, num_past, past_width, wanted):
    """The token `ahead` of a place, behind it if negative; -1 outside the place's own text."""
    is_past = place < num_past
    column = tl.where(is_past, place % past_width, place - num_past) + ahead
    is_inside = wanted & (column >= 0) & (column < tl.where(is_past, past_width, width))
    past = tl.load(past_ptr + place + ahead, mask=is_inside & is_past, other=-1)
    own = tl.load(history_ptr + column, mask=is_inside & (place >= num_past), other=-1)
    return tl.where(is_past, past, own)


@triton.jit
def voters(place, k, least, match_ptr, history_ptr, past_ptr, width, num_past, past_width):
    """The tokens `k` behind the places that still vote, and which those are."""
    matched = tl.load(match_ptr + place, mask=place < num_past + width, other=0)
    wanted = matched == least
    token = token_at(place, k, history_ptr, past_ptr, width, num_past, past_width, wanted)
    return token, wanted


@triton.jit(do_not_specialize=["width", "num_past", "past_width", "vocab_size"])
def suffix_kernel(
    history_ptr, length_ptr, past_ptr, match_ptr, votes_ptr, drafts_ptr, matched_ptr,
    width, num_past, past_width, vocab_size,
    NUM_DRAFTS: tl.constexpr, MAX_MATCH: tl.constexpr, MIN_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Note the match of every place, then let the places of the longest one vote, K times.

    A place is a column of the past texts, flattened, or of the request's own behind them.  Places
    that lose their vote are noted as matching nothing.
    """
    b = tl.program_id(0).to(tl.int64)
    num_places = num_past + width
    history_ptr += b * width
    match_ptr += b * num_places
    votes_ptr += b * vocab_size
    length = tl.load(length_ptr + b).to(tl.int32)
    longest_L = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        is_equal = place < num_places
        here = token_at(place, 0, history_ptr, past_ptr, width, num_past, past_width, is_equal)
        is_equal = is_equal & (here >= 0)
        matched = tl.zeros([BLOCK], tl.int32)
        for back in range(1, MAX_MATCH + 1):
            newest = tl.load(history_ptr + tl.maximum(length - back, 0))
            before = token_at(
                place, -back, history_ptr, past_ptr, width, num_past, past_width, is_equal
            )
            is_equal = is_equal & (before == newest) & (before >= 0) & (length >= back)
            matched += is_equal.to(tl.int32)
        tl.store(match_ptr + place, matched, mask=place < num_places)
        longest_L = tl.maximum(longest_L, matched)
    longest = tl.max(longest_L, 0)
    is_long = longest >= MIN_MATCH
    tl.store(matched_ptr + b, tl.where(is_long, longest, 0))
    least = tl.maximum(longest, MIN_MATCH)  # no place has it where none is long enough
    for k in range(NUM_DRAFTS):
        tl.debug_barrier()  # the matches that vote are noted, and the table is empty
        for first in range(0, num_places, BLOCK):
            place = first + tl.arange(0, BLOCK)
            token, wanted = voters(
                place, k, least, match_ptr, history_ptr, past_ptr, width, num_past, past_width
            )
            tl.atomic_add(votes_ptr + token, 1, mask=wanted & (token >= 0))
        tl.debug_barrier()
        best_L = tl.full([BLOCK], -1, tl.int64)
        for first in range(0, num_places, BLOCK):
            place = first + tl.arange(0, BLOCK)
            token, wanted = voters(
                place, k, least, match_ptr, history_ptr, past_ptr, width, num_past, past_width
            )
            wanted = wanted & (token >= 0)
            count = tl.load(votes_ptr + token, mask=wanted, other=0, volatile=True).to(tl.int64)
            best_L = tl.maximum(best_L, tl.where(wanted, count * num_places + place, -1))
        best = tl.max(best_L, 0)
        is_found = best >= 0
        best_place = (tl.maximum(best, 0) % num_places).to(tl.int32)
        draft = token_at(
            best_place, k, history_ptr, past_ptr, width, num_past, past_width, is_found
        )
        tl.store(drafts_ptr + b * NUM_DRAFTS + k, draft)
        tl.debug_barrier()  # the table was read
        for first in range(0, num_places, BLOCK):
            place = first + tl.arange(0, BLOCK)
            token, wanted = voters(
                place, k, least, match_ptr, history_ptr, past_ptr, width, num_past, past_width
            )
            tl.store(votes_ptr + token, 0, mask=wanted & (token >= 0))
            tl.store(match_ptr + place, 0, mask=wanted & (token != draft))
