"""Log-probabilities of the chosen tokens, and of the best ones at their positions."""

from __future__ import annotations

import triton
import triton.language as tl

from compilespec.ops.sample.kernels.requests import LAST_ID, LOGPROBS, NONE, NUM_WORDS


@triton.jit
def logprobs_kernel(
    logits_ptr, chosen_ptr, row_ptr, words_ptr, value_ptr, id_ptr, own_ptr,
    num_tokens, vocab, logits_b, logits_s, value_tokens,
    MOST: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row: log-softmax at the chosen token and, one pass each, at the best ones."""
    at = tl.program_id(0)
    b, s = at // num_tokens, at % num_tokens
    row = tl.load(row_ptr + b)
    asked = tl.load(words_ptr + row * NUM_WORDS + LOGPROBS)
    if asked <= 0:
        tl.store(own_ptr + at, 0.0)
        return
    logits_ptr += b.to(tl.int64) * logits_b + s * logits_s
    best_V = tl.full([BLOCK], NONE, WIDE)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=NONE).to(WIDE)
        best_V = tl.maximum(best_V, logit)
    best = tl.max(best_V, 0)
    mass_V = tl.zeros([BLOCK], WIDE)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=NONE).to(WIDE)
        mass_V += tl.exp(logit - best)
    offset = best.to(tl.float64) + tl.log(tl.sum(mass_V.to(tl.float64), 0))
    place = row * value_tokens + s
    chosen = tl.load(logits_ptr + tl.load(chosen_ptr + at))
    own = (chosen.to(tl.float64) - offset).to(tl.float32)
    tl.store(own_ptr + at, own)
    tl.store(value_ptr + place * (MOST + 1), own)
    last, last_id = tl.full([], float("inf"), WIDE), tl.full([], -1, tl.int32)
    for n in range(tl.minimum(tl.minimum(asked - 1, MOST), vocab)):
        top_V = tl.full([BLOCK], NONE, WIDE)
        place_V = tl.full([BLOCK], LAST_ID, tl.int32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=NONE).to(WIDE)
            is_left = (logit < last) | ((logit == last) & (ids > last_id))
            is_better = is_left & (ids < vocab) & ((logit > top_V) | (place_V == LAST_ID))
            top_V = tl.where(is_better, logit, top_V)
            place_V = tl.where(is_better, ids, place_V)
        last = tl.max(top_V, 0)
        last_id = tl.min(tl.where(top_V == last, place_V, LAST_ID), 0)
        tl.store(
            value_ptr + place * (MOST + 1) + 1 + n, (last.to(tl.float64) - offset).to(tl.float32)
        )
        tl.store(id_ptr + place * MOST + n, last_id)
