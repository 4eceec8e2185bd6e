"""A request's sampling parameters, read in a kernel from its state row."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from compilespec.ops.sample import layout

TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
TOP_P = tl.constexpr(layout.TOP_P)
MIN_P = tl.constexpr(layout.MIN_P)
REPETITION = tl.constexpr(layout.REPETITION)
PRESENCE = tl.constexpr(layout.PRESENCE)
FREQUENCY = tl.constexpr(layout.FREQUENCY)
SEED_LOW = tl.constexpr(layout.SEED_LOW)
SEED_HIGH = tl.constexpr(layout.SEED_HIGH)
SAMPLE = tl.constexpr(layout.SAMPLE)
FLAGS = tl.constexpr(layout.FLAGS)
TOP_K = tl.constexpr(layout.TOP_K)
PROMPT_LEN = tl.constexpr(layout.PROMPT_LEN)
MIN_NEW = tl.constexpr(layout.MIN_NEW)
LOGPROBS = tl.constexpr(layout.LOGPROBS)
NUM_STOPS = tl.constexpr(layout.NUM_STOPS)
FIRST_STOP = tl.constexpr(layout.FIRST_STOP)
PENALISE = tl.constexpr(layout.PENALISE)
BIAS = tl.constexpr(layout.BIAS)
GUIDE = tl.constexpr(layout.GUIDE)
MIN_TEMPERATURE = tl.constexpr(layout.MIN_TEMPERATURE)
NUM_REALS = tl.constexpr(layout.NUM_FLOATS)
NUM_WORDS = tl.constexpr(layout.NUM_INTS)
NONE = tl.constexpr(float("-inf"))
LAST_ID = tl.constexpr(2147483647)


class Requests(NamedTuple):
    """The requests of a launch."""

    row: Any  # int64 [B], state rows
    drawn: Any  # int32 [B, S], position of the token being drawn
    reals: Any  # float32 [R, NUM_REALS]
    words: Any  # int32 [R, NUM_WORDS]


@triton.jit
def is_plain(reals_ptr, words_ptr):
    """True where a request takes the argmax of the unprocessed logits."""
    changes = tl.load(words_ptr + FLAGS) | tl.load(words_ptr + MIN_NEW)
    return (tl.load(reals_ptr + TEMPERATURE) < MIN_TEMPERATURE) & (changes == 0)


@triton.jit
def filters_of(reals_ptr, words_ptr, vocab):
    """top_k (0: none), top_p, min_p, and whether a request has any of them."""
    top_k = tl.load(words_ptr + TOP_K)
    top_k = tl.where(top_k < vocab, tl.maximum(top_k, 0), 0)
    top_p, min_p = tl.load(reals_ptr + TOP_P), tl.load(reals_ptr + MIN_P)
    is_drawn = tl.load(reals_ptr + TEMPERATURE) >= MIN_TEMPERATURE
    return top_k, top_p, min_p, is_drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
