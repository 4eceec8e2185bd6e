"""Filters: the score below which top_k, then top_p, then min_p drop a token.

A filter is a radix select: it searches the highest score from which on the scores weigh enough, a
digit of the score's bits at a time.  Many programs share a row; each adds what its ids weigh to
the row's table of a digit, and the programs of the next launch begin with what that table shows.
Weights are integers (counts; probabilities in fixed point), whose sums have no order: the same
threshold whoever comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from compilespec.ops.sample.kernels.requests import NONE, filters_of
from compilespec.ops.sample.kernels.scores import row_of, scores_at

DIGIT = tl.constexpr(11)  # bits
DIGITS = tl.constexpr(2048)  # values of a digit


class Search(NamedTuple):
    """The results that the steps of a search leave for each other.  Steps of top_k come first, then
    those of top_p.
    """

    tables: Any  # int64 [rows, steps, DIGITS], zeros to begin with
    found: Any  # [rows, steps], the bits that the steps before have found
    wanted: Any  # int64 [rows, steps], the weight that is left to find
    best: Any  # [rows, spans], the best score
    num_spans: Any
    unit: Any  # weight of the best token in top_p


@triton.jit(do_not_specialize=["step"])
def search_kernel(
    requests, window, search, step,
    BY_MASS: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step over one span of a row, for the rows that ask for its filter."""
    index = tl.program_id(0)
    row = row_of(requests, window, index)
    top_k, top_p, _, is_asked = filters_of(row.reals, row.words, row.vocab)
    counts = is_asked & (top_k > 0)
    weighs = is_asked & (top_p < 1)
    if BY_MASS:
        if weighs == 0:
            return
    elif (is_asked == 0) | ((step > 0) & (counts == 0)):
        return
    found = tl.zeros([], KEY)
    wanted = top_k.to(tl.int64)
    lowest, best = tl.full([], NONE, WIDE), tl.full([], 0, WIDE)
    local = step
    if BY_MASS:
        local = step - STEPS
        best = best_score(search, index, SPANS)
        if (best == NONE) | (best == float("inf")):
            return
        if counts:
            lowest = found_score(search, index, STEPS - 1, top_p, STEPS, WIDE, KEY, BITS)
    if local > 0:
        found, wanted = narrowed(search, index, step - 1, top_p, STEPS, KEY, BITS)
    place = index * (2 * STEPS) + step
    if tl.program_id(1) == 0:
        tl.store(search.found + place, found)
        tl.store(search.wanted + place, wanted)
    shift = tl.maximum(BITS - (local + 1) * DIGIT, 0)
    above = tl.where(local > 0, tl.full([], -1, KEY) << ((BITS - local * DIGIT) % BITS), 0)
    table_ptr = search.tables + place * DIGITS
    begin = tl.program_id(1) * SPAN
    best_V = tl.full([BLOCK], NONE, WIDE)
    for first in range(begin, tl.minimum(begin + SPAN, row.vocab), BLOCK):
        ids = first + tl.arange(0, BLOCK)
        score = scores_at(ids, row, WIDE)
        key = ordered(score, KEY, BITS)
        digit = (key >> shift).to(tl.int32) & (DIGITS - 1)
        is_mine = (ids < row.vocab) & (score >= lowest) & (((key ^ found) & above) == 0)
        if BY_MASS:
            mass = tl.where(is_mine, tl.exp(score - best), 0.0)
            weight = (mass * search.unit + 0.5).to(tl.int64)
            tl.atomic_add(table_ptr + digit, weight, mask=weight > 0, sem="relaxed")
        else:
            best_V = tl.maximum(best_V, score)
            if counts:
                d = tl.arange(0, DIGITS)
                number = tl.histogram(digit, DIGITS, mask=is_mine).to(tl.int64)
                tl.atomic_add(table_ptr + d, number, mask=number > 0, sem="relaxed")
    if not BY_MASS:
        tl.store(search.best + index * search.num_spans + tl.program_id(1), tl.max(best_V, 0))


@triton.jit
def lowest_kept(
    search, index, row,
    STEPS: tl.constexpr, SPANS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """After all steps: a row's lowest score that is kept; -inf if nothing is dropped."""
    top_k, top_p, min_p, is_asked = filters_of(row.reals, row.words, row.vocab)
    lowest = tl.full([], NONE, WIDE)
    if is_asked:
        best = best_score(search, index, SPANS)
        if (best > NONE) & (best < float("inf")):
            if top_p < 1:
                lowest = found_score(search, index, 2 * STEPS - 1, top_p, STEPS, WIDE, KEY, BITS)
            elif top_k > 0:
                lowest = found_score(search, index, STEPS - 1, top_p, STEPS, WIDE, KEY, BITS)
            if min_p > 0:
                lowest = tl.maximum(lowest, best + tl.log(min_p.to(tl.float64)).to(WIDE))
    return lowest


@triton.jit
def best_score(search, index, SPANS: tl.constexpr):
    span = tl.arange(0, SPANS)
    is_span = span < search.num_spans
    return tl.max(
        tl.load(search.best + index * search.num_spans + span, mask=is_span, other=NONE), 0
    )


@triton.jit
def found_score(
    search, index, step, top_p,
    STEPS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The score that a filter's last step finds."""
    key, _ = narrowed(search, index, step, top_p, STEPS, KEY, BITS)
    return score_of(key, WIDE, KEY, BITS)


@triton.jit
def narrowed(
    search, index, step, top_p, STEPS: tl.constexpr, KEY: tl.constexpr, BITS: tl.constexpr
):
    """The result of a step: the largest digit from which on the scores have the wanted weight,
    below the digits of the steps before; and the weight still wanted of the scores with this digit.
    """
    place = index * (2 * STEPS) + step
    d = tl.arange(0, DIGITS)
    weight_D = tl.load(search.tables + place * DIGITS + d)
    wanted = tl.load(search.wanted + place)
    total = tl.sum(weight_D, 0)
    if step == STEPS:  # the whole is known now
        share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        wanted = tl.maximum(share, 1)
    from_D = total - tl.cumsum(weight_D, 0) + weight_D
    digit = tl.max(tl.where(from_D >= wanted, d, 0), 0)
    wanted -= tl.sum(tl.where(d > digit, weight_D, 0), 0)
    shift = tl.maximum(BITS - (step % STEPS + 1) * DIGIT, 0)
    return tl.load(search.found + place) | (digit.to(KEY) << shift), wanted


@triton.jit
def ordered(score, KEY: tl.constexpr, BITS: tl.constexpr):
    """A score's bits such that they, read as an unsigned number, are ordered as scores are."""
    bits = score.to(KEY, bitcast=True)
    return bits ^ ((bits >> (BITS - 1)) | tl.full([], -(2 ** (BITS - 1)), KEY))


@triton.jit
def score_of(key, WIDE: tl.constexpr, KEY: tl.constexpr, BITS: tl.constexpr):
    """The inverse of `ordered`."""
    bits = key ^ ((~(key >> (BITS - 1))) | tl.full([], -(2 ** (BITS - 1)), KEY))
    return bits.to(WIDE, bitcast=True)
