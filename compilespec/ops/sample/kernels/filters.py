"""Filters: the score below which top_k, then top_p, then min_p drop a token."""

from __future__ import annotations

import triton
import triton.language as tl

from compilespec.ops.sample.kernels.requests import (
    MIN_P,
    MIN_TEMPERATURE,
    NONE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from compilespec.ops.sample.kernels.scores import row_of, scores_at


@triton.jit
def threshold_kernel(
    requests, window, lowest_ptr,
    WIDE: tl.constexpr, KEY: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each row's lowest score that is kept; -inf if nothing is dropped."""
    row = row_of(requests, window, tl.program_id(0))
    top_k, top_p = tl.load(row.words + TOP_K), tl.load(row.reals + TOP_P)
    min_p = tl.load(row.reals + MIN_P)
    cuts = (top_k > 0) & (top_k < row.vocab)
    is_drawn = tl.load(row.reals + TEMPERATURE) >= MIN_TEMPERATURE
    lowest = tl.full([], NONE, WIDE)
    if is_drawn & (cuts | (top_p < 1) | (min_p > 0)):
        best = best_score(row, WIDE, BLOCK)
        if (best > NONE) & (best < float("inf")):
            if cuts:
                lowest = highest_with(
                    top_k.to(WIDE), lowest, best, row, False, WIDE, KEY, BITS, BLOCK
                )
            if top_p < 1:
                wanted = top_p.to(WIDE) * mass_from(lowest, best, row, WIDE, BLOCK)
                lowest = highest_with(wanted, lowest, best, row, True, WIDE, KEY, BITS, BLOCK)
            if min_p > 0:
                lowest = tl.maximum(lowest, best + tl.log(min_p.to(tl.float64)).to(WIDE))
    tl.store(lowest_ptr + tl.program_id(0), lowest)


@triton.jit
def best_score(row, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    best_V = tl.full([BLOCK], NONE, WIDE)
    for first in range(0, row.vocab, BLOCK):
        best_V = tl.maximum(best_V, scores_at(first + tl.arange(0, BLOCK), row, WIDE))
    return tl.max(best_V, 0)


@triton.jit
def mass_from(lowest, best, row, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Probability of the scores from `lowest` up, relative to the best token's."""
    mass_V = tl.zeros([BLOCK], WIDE)
    for first in range(0, row.vocab, BLOCK):
        score = scores_at(first + tl.arange(0, BLOCK), row, WIDE)
        mass_V += tl.where(score >= lowest, tl.exp(score - best), 0.0)
    return tl.sum(mass_V, 0)


@triton.jit
def highest_with(
    wanted, lowest, best, row,
    BY_MASS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest score such that the scores from there up (and >= lowest) weigh at least `wanted`.

    Each weighs 1, or its probability.  Each pass finds two bits of the score's ordered key.
    """
    found = tl.full([], -(2 ** (BITS - 1)), KEY)
    for step in range(BITS // 2):
        shift = BITS - 2 - 2 * step
        unit = tl.full([], 1, KEY) << shift
        one, two, three = found + unit, found + 2 * unit, found + 3 * unit
        one_V, two_V = tl.zeros([BLOCK], WIDE), tl.zeros([BLOCK], WIDE)
        three_V = tl.zeros([BLOCK], WIDE)
        for first in range(0, row.vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            score = scores_at(ids, row, WIDE)
            bits = score.to(KEY, bitcast=True)
            key = bits ^ ((bits >> (BITS - 1)) & (2 ** (BITS - 1) - 1))
            weight = tl.where((ids < row.vocab) & (score >= lowest), 1.0, 0.0).to(WIDE)
            if BY_MASS:
                weight *= tl.exp(score - best)
            one_V += tl.where(key >= one, weight, 0.0)
            two_V += tl.where(key >= two, weight, 0.0)
            three_V += tl.where(key >= three, weight, 0.0)
        enough = (tl.sum(one_V, 0) >= wanted).to(KEY) + (tl.sum(two_V, 0) >= wanted).to(KEY)
        found += (enough + (tl.sum(three_V, 0) >= wanted).to(KEY)) * unit
    bits = found ^ ((found >> (BITS - 1)) & (2 ** (BITS - 1) - 1))
    return bits.to(WIDE, bitcast=True)
