"""Scores: the logits of a row after penalties, bias, guide and temperature.

They are recomputed from the logits wherever they are read, so that no [rows, V] buffer exists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from compilespec.ops.sample.kernels.requests import (
    BIAS,
    FIRST_STOP,
    FLAGS,
    FREQUENCY,
    GUIDE,
    MIN_NEW,
    MIN_TEMPERATURE,
    NONE,
    NUM_REALS,
    NUM_STOPS,
    NUM_WORDS,
    PENALISE,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    TEMPERATURE,
    filters_of,
)


class Window(NamedTuple):
    """The rows of a launch: S of each of B requests, and what changes their logits."""

    logits: Any  # [B, S, V], the last dimension dense
    bias: Any  # float32 [R, V]
    context: Any  # int32 [R, max_seq_len], prompt and output
    counts: Any  # int32 [B, V], of the context that all rows of a request share
    mask: Any  # int32 [R, S, V / 32], the guide's bits
    num_tokens: Any  # S
    vocab: Any  # V
    max_seq_len: Any
    mask_rows: Any
    mask_words: Any
    logits_b: Any  # strides of `logits`
    logits_s: Any


class WindowRow(NamedTuple):
    """One row of a window: the same pointers, at its request."""

    logits: Any
    reals: Any
    words: Any
    bias: Any
    context: Any
    counts: Any
    mask: Any
    vocab: Any
    counted: Any  # context[:counted] is in `counts`
    num_context: Any  # end of the uncounted context
    drawn: Any  # position of the token being drawn


@triton.jit
def row_of(requests, window, index):
    """Row `index` of the B * S rows of a window."""
    b, s = index // window.num_tokens, index % window.num_tokens
    row = tl.load(requests.row + b)
    drawn_ptr = requests.drawn + b * window.num_tokens
    drawn = tl.load(drawn_ptr + s)
    return WindowRow(
        window.logits + b.to(tl.int64) * window.logits_b + s * window.logits_s,
        requests.reals + row * NUM_REALS,
        requests.words + row * NUM_WORDS,
        window.bias + row * window.vocab,
        window.context + row * window.max_seq_len,
        window.counts + b.to(tl.int64) * window.vocab,
        window.mask + (row * window.mask_rows + s) * window.mask_words,
        window.vocab,
        shared_context(drawn_ptr, window.num_tokens, window.max_seq_len),
        tl.minimum(drawn, window.max_seq_len),
        drawn,
    )


@triton.jit
def divide(x, by, WIDE: tl.constexpr):
    """Round as the reference does."""
    if WIDE == tl.float64:  # noqa: SIM300
        return x / by
    else:
        return tl.div_rn(x, tl.zeros_like(x) + by)


@triton.jit
def scores_at(ids, row, WIDE: tl.constexpr):
    """The logits of `ids` after `process`, guide and temperature; -inf outside the vocabulary."""
    is_id = (ids >= 0) & (ids < row.vocab)
    score = tl.load(row.logits + ids, mask=is_id, other=NONE).to(WIDE)
    flags, prompt_len = tl.load(row.words + FLAGS), tl.load(row.words + PROMPT_LEN)
    if (flags & PENALISE) != 0:
        count = tl.load(row.counts + ids, mask=is_id, other=0)
        for at in range(row.counted, row.num_context):
            more = tl.where(at >= prompt_len, count + 2, tl.maximum(count, 1))
            count = tl.where(ids == tl.load(row.context + at), more, count)
        repetition = tl.load(row.reals + REPETITION).to(WIDE)
        scaled = tl.where(score < 0, score * repetition, divide(score, repetition, WIDE))
        score = tl.where(count != 0, scaled, score)
        score -= tl.load(row.reals + FREQUENCY).to(WIDE) * (count >> 1).to(WIDE)
        presence = tl.load(row.reals + PRESENCE).to(WIDE)
        score -= tl.where(count >= 2, presence, tl.zeros_like(score))
    if (flags & BIAS) != 0:
        score += tl.load(row.bias + ids, mask=is_id, other=0.0).to(WIDE)
    if row.drawn - prompt_len < tl.load(row.words + MIN_NEW):
        for stop in range(tl.load(row.words + NUM_STOPS)):
            score = tl.where(ids == tl.load(row.words + FIRST_STOP + stop), NONE, score)
    if (flags & GUIDE) != 0:
        bits = tl.load(row.mask + ids // 32, mask=is_id, other=0) >> (ids % 32)
        score = tl.where((bits & 1) != 0, score, NONE)
    temperature = tl.load(row.reals + TEMPERATURE)
    if temperature >= MIN_TEMPERATURE:
        score = divide(score, temperature.to(WIDE), WIDE)
    return tl.where(is_id, score, NONE)


@triton.jit
def count_kernel(
    requests, window, tables_ptr, table_size, ids_ptr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row of a request.  Clear the tables of its filters; its first row also writes the fed
    tokens into the context, and counts the context that all rows of the request share.

    An id's count is 2 for each occurrence in the output, and not 0 if it is in prompt or output.
    """
    num_tokens, vocab, max_seq_len = window.num_tokens, window.vocab, window.max_seq_len
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(requests.row + b)
    words_ptr = requests.words + row * NUM_WORDS
    drawn_ptr = requests.drawn + b * window.num_tokens
    _, _, _, is_filtered = filters_of(requests.reals + row * NUM_REALS, words_ptr, vocab)
    if is_filtered:
        tables_ptr += (b * num_tokens + tl.program_id(1)) * table_size
        for first in range(0, table_size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(tables_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < table_size)
    if (tl.program_id(1) > 0) | ((tl.load(words_ptr + FLAGS) & PENALISE) == 0):
        return
    context_ptr = window.context + row * max_seq_len
    counts_ptr = window.counts + b * vocab
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        tl.store(counts_ptr + ids, tl.zeros([BLOCK], tl.int32), mask=ids < vocab)
    if HAS_IDS:
        for s in range(num_tokens):
            drawn = tl.load(drawn_ptr + s)
            if (drawn > 0) & (drawn <= max_seq_len):
                tl.store(context_ptr + drawn - 1, tl.load(ids_ptr + b * num_tokens + s))
    tl.debug_barrier()
    counted = shared_context(drawn_ptr, num_tokens, max_seq_len)
    prompt_len = tl.load(words_ptr + PROMPT_LEN)
    for first in range(0, counted, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(context_ptr + at, mask=at < counted, other=-1)
        is_id = (token >= 0) & (token < vocab)
        tl.atomic_add(counts_ptr + token, 2, mask=is_id & (at >= prompt_len))
        tl.atomic_max(counts_ptr + token, 1, mask=is_id & (at < prompt_len))


@triton.jit
def shared_context(drawn_ptr, num_tokens, max_seq_len):
    """Length of the context before every row of a request, without this step's writes."""
    least = max_seq_len + 1
    for s in range(num_tokens):
        least = tl.minimum(least, tl.load(drawn_ptr + s))
    return tl.maximum(tl.minimum(least, max_seq_len) - 1, 0)
