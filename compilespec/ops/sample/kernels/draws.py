"""Draws: the best sum of score and noise, first in each span of the vocabulary, then overall."""

from __future__ import annotations

import triton
import triton.language as tl

from compilespec.ops.sample.kernels.filters import lowest_kept
from compilespec.ops.sample.kernels.noise import gumbel, noise_of, philox_words
from compilespec.ops.sample.kernels.requests import (
    LAST_ID,
    MIN_TEMPERATURE,
    NONE,
    NUM_REALS,
    NUM_WORDS,
    TEMPERATURE,
    is_plain,
)
from compilespec.ops.sample.kernels.scores import divide, row_of, scores_at


@triton.jit
def better_of(score, ids, best, place):
    is_better = score > best
    return tl.where(is_better, score, best), tl.where(is_better, ids, place)


@triton.jit
def store_best(best, place, index, best_ptr, place_ptr):
    """Write the best of a program's lanes as its span's best; the first id wins ties."""
    top = tl.max(best, 0)
    at = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(place_ptr + at, tl.min(tl.where(best == top, place, LAST_ID), 0))


@triton.jit
def draw_kernel(
    requests, window, search, best_ptr, place_ptr,
    STEPS: tl.constexpr, SPANS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best token of a row in one span of the vocabulary."""
    row = row_of(requests, window, tl.program_id(0))
    if is_plain(row.reals, row.words):
        return
    is_drawn = tl.load(row.reals + TEMPERATURE) >= MIN_TEMPERATURE
    lowest = lowest_kept(search, tl.program_id(0), row, STEPS, SPANS, WIDE, KEY, BITS)
    begin = tl.program_id(1) * SPAN
    best = tl.full([LANES], NONE, WIDE)
    place = tl.zeros([LANES], tl.int32) + begin
    for first in range(begin, tl.minimum(begin + SPAN, row.vocab), 4 * LANES):
        counter = first // 4 + tl.arange(0, LANES)
        ids = ((counter >> 4) << 6) | (counter & 15)
        words = philox_words(counter, row.drawn, row.words)
        for k in tl.static_range(4):
            score = scores_at(ids + 16 * k, row, WIDE)
            noise = tl.where(is_drawn, gumbel(words[k]), 0.0).to(WIDE)
            score = tl.where(score >= lowest, score + noise, NONE)
            best, place = better_of(score, ids + 16 * k, best, place)
    store_best(best, place, tl.program_id(0), best_ptr, place_ptr)


@triton.jit
def draft_kernel(
    requests, logits_ptr, ids_ptr, best_ptr, place_ptr, vocab, logits_b,
    HAS_MAP: tl.constexpr, SPAN: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same for a drafter: only temperature and noise, over target ids if it has a map."""
    b = tl.program_id(0)
    row = tl.load(requests.row + b)
    words_ptr = requests.words + row * NUM_WORDS
    temperature = tl.load(requests.reals + row * NUM_REALS + TEMPERATURE)
    if temperature < MIN_TEMPERATURE:
        return
    logits_ptr += b.to(tl.int64) * logits_b
    drawn = tl.load(requests.drawn + b)
    begin = tl.program_id(1) * SPAN
    best = tl.full([LANES], NONE, WIDE)
    place = tl.zeros([LANES], tl.int32) + begin
    for first in range(begin, tl.minimum(begin + SPAN, vocab), 4 * LANES):
        if HAS_MAP:
            for k in tl.static_range(4):
                at = first + k * LANES + tl.arange(0, LANES)
                logit = tl.load(logits_ptr + at, mask=at < vocab, other=NONE).to(WIDE)
                ids = tl.load(ids_ptr + at, mask=at < vocab, other=-1).to(tl.int32)
                noise = noise_of(tl.maximum(ids, 0), drawn, words_ptr).to(WIDE)
                score = divide(logit, temperature.to(WIDE), WIDE) + noise
                best, place = better_of(tl.where(ids >= 0, score, NONE), at, best, place)
        else:
            counter = first // 4 + tl.arange(0, LANES)
            words = philox_words(counter, drawn, words_ptr)
            for k in tl.static_range(4):
                ids = (((counter >> 4) << 6) | (counter & 15)) + 16 * k
                logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=NONE).to(WIDE)
                score = divide(logit, temperature.to(WIDE), WIDE) + gumbel(words[k]).to(WIDE)
                best, place = better_of(score, ids, best, place)
    store_best(best, place, b, best_ptr, place_ptr)


@triton.jit
def pick_kernel(
    requests, best_ptr, place_ptr, greedy_ptr, ids_ptr, chosen_ptr, num_tokens, spans, vocab,
    HAS_MAP: tl.constexpr, FOR_DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of a row's spans, or the token of a plain greedy row."""
    at = tl.program_id(0)
    row = tl.load(requests.row + at // num_tokens)
    chosen = tl.load(greedy_ptr + at)
    reals_ptr = requests.reals + row * NUM_REALS
    if FOR_DRAFT:
        is_asked = tl.load(reals_ptr + TEMPERATURE) >= MIN_TEMPERATURE
    else:
        is_asked = is_plain(reals_ptr, requests.words + row * NUM_WORDS) == 0
    if is_asked:
        span = tl.arange(0, BLOCK)
        best = tl.load(best_ptr + at * spans + span, mask=span < spans, other=NONE)
        place = tl.load(place_ptr + at * spans + span, mask=span < spans, other=LAST_ID)
        top = tl.max(best, 0)
        found = tl.minimum(tl.min(tl.where(best == top, place, LAST_ID), 0), vocab - 1)
        if HAS_MAP:
            found = tl.load(ids_ptr + found).to(tl.int32)
        if FOR_DRAFT:
            found = tl.where(top > NONE, found, chosen)
        chosen = found.to(chosen.dtype)
    tl.store(chosen_ptr + at, chosen)
