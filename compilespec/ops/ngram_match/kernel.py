"""ngram_match in Triton: one program per request, which reads only the request's own tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def ngram_match(
    history_BL: Tensor, length_B: Tensor, num_draft_tokens: int, max_ngram: int, min_ngram: int
) -> tuple[Tensor, Tensor]:
    """See `ngram_match_reference`."""
    batch, width = history_BL.shape
    drafts_BK = history_BL.new_empty((batch, num_draft_tokens))
    matched_B = history_BL.new_empty((batch,))
    if batch:
        ngram_kernel[(batch,)](
            history_BL.contiguous(), length_B.contiguous(), drafts_BK, matched_B, width,
            NUM_DRAFTS=num_draft_tokens, MAX_NGRAM=max_ngram, MIN_NGRAM=min_ngram,
            BLOCK_K=triton.next_power_of_2(num_draft_tokens), BLOCK=1024,
        )  # fmt: skip
    return drafts_BK, matched_B


@triton.jit(do_not_specialize=["width"])
def ngram_kernel(
    history_ptr, length_ptr, drafts_ptr, matched_ptr, width,
    NUM_DRAFTS: tl.constexpr, MAX_NGRAM: tl.constexpr, MIN_NGRAM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the last column with the longest match, and draft the tokens after it."""
    b = tl.program_id(0).to(tl.int64)
    history_ptr += b * width
    length = tl.load(length_ptr + b).to(tl.int32)
    best_L = tl.full([BLOCK], -1, tl.int64)
    for first in range(0, tl.minimum(length, width), BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_equal = (column < length) & (column < width)
        matched = tl.zeros([BLOCK], tl.int64)
        for back in range(1, MAX_NGRAM + 1):
            newest = tl.load(history_ptr + tl.maximum(length - back, 0))
            before = tl.load(
                history_ptr + column - back, mask=is_equal & (column >= back), other=-1
            )
            is_equal = is_equal & (before == newest) & (before >= 0) & (length >= back)
            matched += is_equal.to(tl.int64)
        is_inside = (column < length) & (column < width)
        score = tl.where(is_inside, matched * (width + 1) + column, -1)
        best_L = tl.maximum(best_L, score)
    best = tl.max(best_L, 0)
    is_found = best >= MIN_NGRAM * (width + 1)
    tl.store(matched_ptr + b, tl.where(is_found, best // (width + 1), 0).to(tl.int32))
    k = tl.arange(0, BLOCK_K)
    wanted = best % (width + 1) + k
    is_draft = is_found & (wanted < length) & (wanted < width) & (k < NUM_DRAFTS)
    draft = tl.load(history_ptr + wanted, mask=is_draft, other=-1)
    tl.store(drafts_ptr + b * NUM_DRAFTS + k, draft, mask=k < NUM_DRAFTS)
