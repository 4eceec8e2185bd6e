"""sample, draw and note_logprobs in Triton: rows that ask for nothing leave at once.

A row that asks goes through four kernels: its context is counted (penalties), the lowest score
that the filters keep is searched (filters), blocks of the vocabulary give their best of score and
noise, and the best of those is picked.  Scores are made anew from the logits in every pass, so
that no [rows, V] buffer exists.  Noise of 64 token ids comes from 16 counters, as in `noise_bits`.
Grids depend on shapes only: safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops._tensors import dense_rows, wide_dtype
from compilespec.ops.sample import layout

_SPAN = 8192  # ids of one program of the draw kernels; a multiple of 4 * _LANES
_LANES = 256
_BLOCK = 2048  # ids that a whole-row kernel holds at once

_TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
_TOP_P = tl.constexpr(layout.TOP_P)
_MIN_P = tl.constexpr(layout.MIN_P)
_REPETITION = tl.constexpr(layout.REPETITION)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_SEED_LOW = tl.constexpr(layout.SEED_LOW)
_SEED_HIGH = tl.constexpr(layout.SEED_HIGH)
_SAMPLE = tl.constexpr(layout.SAMPLE)
_FLAGS = tl.constexpr(layout.FLAGS)
_TOP_K = tl.constexpr(layout.TOP_K)
_PROMPT_LEN = tl.constexpr(layout.PROMPT_LEN)
_MIN_NEW = tl.constexpr(layout.MIN_NEW)
_LOGPROBS = tl.constexpr(layout.LOGPROBS)
_NUM_STOPS = tl.constexpr(layout.NUM_STOPS)
_FIRST_STOP = tl.constexpr(layout.FIRST_STOP)
_PENALISE = tl.constexpr(layout.PENALISE)
_BIAS = tl.constexpr(layout.BIAS)
_GUIDE = tl.constexpr(layout.GUIDE)
_MIN_TEMPERATURE = tl.constexpr(layout.MIN_TEMPERATURE)
_STREAM_DRAW = tl.constexpr(layout.STREAM_DRAW)
_NONE = tl.constexpr(float("-inf"))


def sample(
    logits_BSV: Tensor,
    greedy_BS: Tensor,
    ids_BS: Tensor | None,
    row_B: Tensor,
    drawn_BS: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
    bias_RV: Tensor,
    context_RL: Tensor,
    mask_RSW: Tensor,
) -> Tensor:
    """See `sample_reference`."""
    batch, num_tokens, vocab = logits_BSV.shape
    chosen_BS = torch.empty_like(greedy_BS, memory_format=torch.contiguous_format)
    if batch * num_tokens == 0:
        return chosen_BS
    wide, num_rows = wide_dtype(logits_BSV.dtype), batch * num_tokens
    logits_BSV, drawn_BS = dense_rows(logits_BSV), drawn_BS.contiguous()
    counts_BV = row_B.new_empty((batch, vocab), dtype=torch.int32)
    lowest = logits_BSV.new_empty(num_rows, dtype=wide)
    spans = triton.cdiv(vocab, _SPAN)
    best, place = _partial_best(logits_BSV, num_rows, spans, wide)
    params = (row_B.contiguous(), drawn_BS, sampling_RF, sampling_RI)
    sizes = {"NUM_REALS": sampling_RF.shape[1], "NUM_WORDS": sampling_RI.shape[1]}
    count_kernel[(batch,)](
        *params, drawn_BS if ids_BS is None else ids_BS.contiguous(), context_RL, counts_BV,
        num_tokens, vocab, context_RL.shape[1], HAS_IDS=ids_BS is not None, BLOCK=_BLOCK, **sizes,
    )  # fmt: skip
    scored = (
        logits_BSV, *params, bias_RV, context_RL, counts_BV, mask_RSW, num_tokens, vocab,
        context_RL.shape[1], mask_RSW.shape[1], mask_RSW.shape[2], *logits_BSV.stride()[:2],
    )  # fmt: skip
    exact = {"WIDE": _TYPES[wide], "enable_fp_fusion": False, **sizes}
    threshold_kernel[(num_rows,)](
        *scored, lowest, KEY=_KEYS[wide], BITS=8 * wide.itemsize, BLOCK=_BLOCK, num_warps=8, **exact
    )
    draw_kernel[(num_rows, spans)](*scored, lowest, best, place, SPAN=_SPAN, LANES=_LANES, **exact)
    pick_kernel[(num_rows,)](
        best, place, greedy_BS.contiguous(), *params, place, chosen_BS, num_tokens, spans, vocab,
        HAS_MAP=False, FOR_DRAFT=False, BLOCK=triton.next_power_of_2(spans), **sizes,
    )  # fmt: skip
    return chosen_BS


def draw(
    logits_BV: Tensor,
    greedy_B: Tensor,
    ids_V: Tensor | None,
    row_B: Tensor,
    drawn_B: Tensor,
    sampling_RF: Tensor,
    sampling_RI: Tensor,
) -> Tensor:
    """See `draw_reference`; a row without any possible id gets the greedy one."""
    batch, vocab = logits_BV.shape
    chosen_B = torch.empty_like(greedy_B, memory_format=torch.contiguous_format)
    if batch == 0:
        return chosen_B
    wide = wide_dtype(logits_BV.dtype)
    logits_BV, spans = dense_rows(logits_BV), triton.cdiv(vocab, _SPAN)
    best, place = _partial_best(logits_BV, batch, spans, wide)
    params = (row_B.contiguous(), drawn_B.contiguous(), sampling_RF, sampling_RI)
    sizes = {"NUM_REALS": sampling_RF.shape[1], "NUM_WORDS": sampling_RI.shape[1]}
    own_ids, has_map = (place, False) if ids_V is None else (ids_V.contiguous(), True)
    draft_kernel[(batch, spans)](
        logits_BV, *params, own_ids, best, place, vocab, logits_BV.stride(0), HAS_MAP=has_map,
        SPAN=_SPAN, LANES=_LANES, WIDE=_TYPES[wide], enable_fp_fusion=False, **sizes,
    )  # fmt: skip
    pick_kernel[(batch,)](
        best, place, greedy_B.contiguous(), *params, own_ids, chosen_B, 1, spans, vocab,
        HAS_MAP=has_map, FOR_DRAFT=True, BLOCK=triton.next_power_of_2(spans), **sizes,
    )  # fmt: skip
    return chosen_B


def note_logprobs(
    logits_BSV: Tensor,
    chosen_BS: Tensor,
    row_B: Tensor,
    sampling_RI: Tensor,
    logprob_RSN: Tensor,
    logprob_id_RSN: Tensor,
) -> Tensor:
    """See `note_logprobs_reference`."""
    batch, num_tokens, vocab = logits_BSV.shape
    own_BS = logprob_RSN.new_empty((batch, num_tokens))
    if batch * num_tokens == 0:
        return own_BS
    logits_BSV = dense_rows(logits_BSV)
    logprobs_kernel[(batch * num_tokens,)](
        logits_BSV, chosen_BS.contiguous(), row_B.contiguous(), sampling_RI, logprob_RSN,
        logprob_id_RSN, own_BS, num_tokens, vocab, *logits_BSV.stride()[:2],
        logprob_RSN.shape[1], NUM_WORDS=sampling_RI.shape[1], MOST=logprob_id_RSN.shape[2],
        BLOCK=_BLOCK, WIDE=_TYPES[wide_dtype(logits_BSV.dtype)], num_warps=8,
    )  # fmt: skip
    return own_BS


def _partial_best(
    like: Tensor, num_rows: int, spans: int, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    best = like.new_empty((num_rows, spans), dtype=wide)
    return best, like.new_empty((num_rows, spans), dtype=torch.int32)


_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
_KEYS = {torch.float32: tl.int32, torch.float64: tl.int64}


# --- noise ---


@triton.jit
def log(x):
    """Of positive normal float32, about one ulp: what the hardware approximates is worse near 1."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    n, square = exponent.to(tl.float32), f * f
    p = tl.fma(tl.full(f.shape, 7.0376836292e-2, tl.float32), f, -1.1514610310e-1)
    p = tl.fma(p, f, 1.1676998740e-1)
    p = tl.fma(p, f, -1.2420140846e-1)
    p = tl.fma(p, f, 1.4249322787e-1)
    p = tl.fma(p, f, -1.6668057665e-1)
    p = tl.fma(p, f, 2.0000714765e-1)
    p = tl.fma(p, f, -2.4999993993e-1)
    p = tl.fma(p, f, 3.3333331174e-1)
    p = tl.fma(p * f, square, n * -2.12194440e-4)
    p = tl.fma(square, -0.5, p)
    return tl.fma(n, 0.693359375, f + p)


@triton.jit
def gumbel(bits):
    """-log(-log(u)), u = (bits + 1/2) / 2**32; above one half by way of 1 - u."""
    upper = bits.to(tl.int32, bitcast=True) >> 31  # all ones where u > 1/2
    word = bits.to(tl.int32, bitcast=True) ^ upper
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.where(upper != 0, 1.0 - v, v)
    lost, minus_log = 1.0 - u, -log(u)
    # log1p: the rounding of 1 - v is undone in proportion
    precise = tl.where(lost > 0, minus_log * tl.div_rn(v, tl.where(lost > 0, lost, 1.0)), v)
    return -log(tl.where(upper != 0, precise, minus_log))


@triton.jit
def philox_words(place, position, words_ptr):
    """The four words of each counter: ids 64 (place / 16) + 16 k + place % 16, k = 0..3."""
    zero = place.to(tl.uint32) * 0
    return tl.philox_impl(
        place.to(tl.uint32), zero + position.to(tl.uint32),
        zero + tl.load(words_ptr + _SAMPLE).to(tl.uint32), zero + _STREAM_DRAW,
        tl.load(words_ptr + _SEED_LOW).to(tl.uint32), tl.load(words_ptr + _SEED_HIGH).to(tl.uint32),
    )  # fmt: skip


@triton.jit
def noise_of(ids, position, words_ptr):
    """Noise of ids in any order: one counter each."""
    w0, w1, w2, w3 = philox_words(((ids >> 6) << 4) | (ids & 15), position, words_ptr)
    k = (ids >> 4) & 3
    return gumbel(tl.where(k < 2, tl.where(k == 0, w0, w1), tl.where(k == 2, w2, w3)))


# --- scores ---


@triton.jit
def is_plain(reals_ptr, words_ptr):
    """Whether a request takes the argmax of the logits as they are."""
    changes = tl.load(words_ptr + _FLAGS) | tl.load(words_ptr + _MIN_NEW)
    return (tl.load(reals_ptr + _TEMPERATURE) < _MIN_TEMPERATURE) & (changes == 0)


@triton.jit
def divide(x, by, WIDE: tl.constexpr):
    """Rounded as the reference rounds."""
    if WIDE == tl.float64:  # noqa: SIM300
        return x / by
    else:
        return tl.div_rn(x, tl.zeros_like(x) + by)


@triton.jit
def scores_at(
    ids, vocab, logits_ptr, reals_ptr, words_ptr, bias_ptr, context_ptr, counts_ptr, mask_ptr,
    counted, num_context, drawn, WIDE: tl.constexpr,
):  # fmt: skip
    """What `process`, the guide and the temperature make of the logits of `ids`; -inf outside.

    `counts_ptr` counts context[:counted]; the rest of the context, up to `num_context`, follows.
    """
    is_id = (ids >= 0) & (ids < vocab)
    score = tl.load(logits_ptr + ids, mask=is_id, other=_NONE).to(WIDE)
    flags, prompt_len = tl.load(words_ptr + _FLAGS), tl.load(words_ptr + _PROMPT_LEN)
    if (flags & _PENALISE) != 0:
        count = tl.load(counts_ptr + ids, mask=is_id, other=0)
        for at in range(counted, num_context):
            more = tl.where(at >= prompt_len, count + 2, tl.maximum(count, 1))
            count = tl.where(ids == tl.load(context_ptr + at), more, count)
        repetition = tl.load(reals_ptr + _REPETITION).to(WIDE)
        scaled = tl.where(score < 0, score * repetition, divide(score, repetition, WIDE))
        score = tl.where(count != 0, scaled, score)
        score -= tl.load(reals_ptr + _FREQUENCY).to(WIDE) * (count >> 1).to(WIDE)
        presence = tl.load(reals_ptr + _PRESENCE).to(WIDE)
        score -= tl.where(count >= 2, presence, tl.zeros_like(score))
    if (flags & _BIAS) != 0:
        score += tl.load(bias_ptr + ids, mask=is_id, other=0.0).to(WIDE)
    if drawn - prompt_len < tl.load(words_ptr + _MIN_NEW):
        for stop in range(tl.load(words_ptr + _NUM_STOPS)):
            score = tl.where(ids == tl.load(words_ptr + _FIRST_STOP + stop), _NONE, score)
    if (flags & _GUIDE) != 0:
        bits = tl.load(mask_ptr + ids // 32, mask=is_id, other=0) >> (ids % 32)
        score = tl.where((bits & 1) != 0, score, _NONE)
    temperature = tl.load(reals_ptr + _TEMPERATURE)
    if temperature >= _MIN_TEMPERATURE:
        score = divide(score, temperature.to(WIDE), WIDE)
    return tl.where(is_id, score, _NONE)


@triton.jit
def count_kernel(
    row_ptr, drawn_ptr, reals_ptr, words_ptr, ids_ptr, context_ptr, counts_ptr,
    num_tokens, vocab, max_seq_len,
    NUM_REALS: tl.constexpr, NUM_WORDS: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what was fed into the context; count the context that all rows of a request share.

    A count is 2 for each token of the output, and not 0 where a token is in prompt or output.
    """
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + b)
    words_ptr += row * NUM_WORDS
    if (tl.load(words_ptr + _FLAGS) & _PENALISE) == 0:
        return
    context_ptr += row * max_seq_len
    counts_ptr += b * vocab
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        tl.store(counts_ptr + ids, tl.zeros([BLOCK], tl.int32), mask=ids < vocab)
    if HAS_IDS:
        for s in range(num_tokens):
            drawn = tl.load(drawn_ptr + b * num_tokens + s)
            if (drawn > 0) & (drawn <= max_seq_len):
                tl.store(context_ptr + drawn - 1, tl.load(ids_ptr + b * num_tokens + s))
    tl.debug_barrier()
    counted = shared_context(drawn_ptr + b * num_tokens, num_tokens, max_seq_len)
    prompt_len = tl.load(words_ptr + _PROMPT_LEN)
    for first in range(0, counted, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(context_ptr + at, mask=at < counted, other=-1)
        is_id = (token >= 0) & (token < vocab)
        tl.atomic_add(counts_ptr + token, 2, mask=is_id & (at >= prompt_len))
        tl.atomic_max(counts_ptr + token, 1, mask=is_id & (at < prompt_len))


@triton.jit
def shared_context(drawn_ptr, num_tokens, max_seq_len):
    """How much of the context precedes every row of a request and was not written by this step."""
    least = max_seq_len + 1
    for s in range(num_tokens):
        least = tl.minimum(least, tl.load(drawn_ptr + s))
    return tl.maximum(tl.minimum(least, max_seq_len) - 1, 0)


@triton.jit
def threshold_kernel(
    logits_ptr, row_ptr, drawn_ptr, reals_ptr, words_ptr, bias_ptr, context_ptr, counts_ptr,
    mask_ptr, num_tokens, vocab, max_seq_len, mask_rows, mask_words, logits_b, logits_s, lowest_ptr,
    NUM_REALS: tl.constexpr, NUM_WORDS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The score below which top_k, then top_p, then min_p drop a token."""
    b, s = tl.program_id(0) // num_tokens, tl.program_id(0) % num_tokens
    row = tl.load(row_ptr + b)
    reals_ptr += row * NUM_REALS
    words_ptr += row * NUM_WORDS
    top_k, top_p = tl.load(words_ptr + _TOP_K), tl.load(reals_ptr + _TOP_P)
    min_p = tl.load(reals_ptr + _MIN_P)
    cuts = (top_k > 0) & (top_k < vocab)
    is_drawn = tl.load(reals_ptr + _TEMPERATURE) >= _MIN_TEMPERATURE
    lowest = tl.full([], _NONE, WIDE)
    if is_drawn & (cuts | (top_p < 1) | (min_p > 0)):
        logits_ptr += b.to(tl.int64) * logits_b + s * logits_s
        bias_ptr += row * vocab
        context_ptr += row * max_seq_len
        counts_ptr += b.to(tl.int64) * vocab
        mask_ptr += (row * mask_rows + s) * mask_words
        drawn = tl.load(drawn_ptr + b * num_tokens + s)
        counted = shared_context(drawn_ptr + b * num_tokens, num_tokens, max_seq_len)
        num_context = tl.minimum(drawn, max_seq_len)
        best_V = tl.full([BLOCK], _NONE, WIDE)
        for first in range(0, vocab, BLOCK):
            score = scores_at(
                first + tl.arange(0, BLOCK), vocab, logits_ptr, reals_ptr, words_ptr, bias_ptr,
                context_ptr, counts_ptr, mask_ptr, counted, num_context, drawn, WIDE,
            )  # fmt: skip
            best_V = tl.maximum(best_V, score)
        best = tl.max(best_V, 0)
        if (best > _NONE) & (best < float("inf")):
            if cuts:
                lowest = highest_with(
                    top_k.to(WIDE), lowest, best, vocab, logits_ptr, reals_ptr, words_ptr, bias_ptr,
                    context_ptr, counts_ptr, mask_ptr, counted, num_context, drawn,
                    False, WIDE, KEY, BITS, BLOCK,
                )  # fmt: skip
            if top_p < 1:
                mass_V = tl.zeros([BLOCK], WIDE)
                for first in range(0, vocab, BLOCK):
                    score = scores_at(
                        first + tl.arange(0, BLOCK), vocab, logits_ptr, reals_ptr, words_ptr,
                        bias_ptr, context_ptr, counts_ptr, mask_ptr, counted, num_context, drawn,
                        WIDE,
                    )  # fmt: skip
                    mass_V += tl.where(score >= lowest, tl.exp(score - best), 0.0)
                lowest = highest_with(
                    top_p.to(WIDE) * tl.sum(mass_V, 0), lowest, best, vocab, logits_ptr, reals_ptr,
                    words_ptr, bias_ptr, context_ptr, counts_ptr, mask_ptr, counted, num_context,
                    drawn, True, WIDE, KEY, BITS, BLOCK,
                )  # fmt: skip
            if min_p > 0:
                lowest = tl.maximum(lowest, best + tl.log(min_p.to(tl.float64)).to(WIDE))
    tl.store(lowest_ptr + tl.program_id(0), lowest)


@triton.jit
def highest_with(
    wanted, lowest, best, vocab, logits_ptr, reals_ptr, words_ptr, bias_ptr, context_ptr,
    counts_ptr, mask_ptr, counted, num_context, drawn,
    BY_MASS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest score such that the scores from there up (and >= lowest) weigh at least `wanted`.

    Each weighs 1, or its probability.  Two bits of the score's ordered key are found in a pass.
    """
    found = tl.full([], -(2 ** (BITS - 1)), KEY)
    for step in range(BITS // 2):
        shift = BITS - 2 - 2 * step
        unit = tl.full([], 1, KEY) << shift
        one, two, three = found + unit, found + 2 * unit, found + 3 * unit
        one_V, two_V = tl.zeros([BLOCK], WIDE), tl.zeros([BLOCK], WIDE)
        three_V = tl.zeros([BLOCK], WIDE)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            score = scores_at(
                ids, vocab, logits_ptr, reals_ptr, words_ptr, bias_ptr, context_ptr, counts_ptr,
                mask_ptr, counted, num_context, drawn, WIDE,
            )  # fmt: skip
            bits = score.to(KEY, bitcast=True)
            key = bits ^ ((bits >> (BITS - 1)) & (2 ** (BITS - 1) - 1))
            weight = tl.where((ids < vocab) & (score >= lowest), 1.0, 0.0).to(WIDE)
            if BY_MASS:
                weight *= tl.exp(score - best)
            one_V += tl.where(key >= one, weight, 0.0)
            two_V += tl.where(key >= two, weight, 0.0)
            three_V += tl.where(key >= three, weight, 0.0)
        enough = (tl.sum(one_V, 0) >= wanted).to(KEY) + (tl.sum(two_V, 0) >= wanted).to(KEY)
        found += (enough + (tl.sum(three_V, 0) >= wanted).to(KEY)) * unit
    bits = found ^ ((found >> (BITS - 1)) & (2 ** (BITS - 1) - 1))
    return bits.to(WIDE, bitcast=True)


# --- the best of score and noise ---


@triton.jit
def better_of(score, ids, best, place):
    is_better = score > best
    return tl.where(is_better, score, best), tl.where(is_better, ids, place)


@triton.jit
def draw_kernel(
    logits_ptr, row_ptr, drawn_ptr, reals_ptr, words_ptr, bias_ptr, context_ptr, counts_ptr,
    mask_ptr, num_tokens, vocab, max_seq_len, mask_rows, mask_words, logits_b, logits_s, lowest_ptr,
    best_ptr, place_ptr,
    NUM_REALS: tl.constexpr, NUM_WORDS: tl.constexpr, WIDE: tl.constexpr, SPAN: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The best token of a row in one span of the vocabulary."""
    b, s = tl.program_id(0) // num_tokens, tl.program_id(0) % num_tokens
    row = tl.load(row_ptr + b)
    reals_ptr += row * NUM_REALS
    words_ptr += row * NUM_WORDS
    if is_plain(reals_ptr, words_ptr):
        return
    logits_ptr += b.to(tl.int64) * logits_b + s * logits_s
    bias_ptr += row * vocab
    context_ptr += row * max_seq_len
    counts_ptr += b.to(tl.int64) * vocab
    mask_ptr += (row * mask_rows + s) * mask_words
    drawn = tl.load(drawn_ptr + b * num_tokens + s)
    counted = shared_context(drawn_ptr + b * num_tokens, num_tokens, max_seq_len)
    num_context = tl.minimum(drawn, max_seq_len)
    is_drawn = tl.load(reals_ptr + _TEMPERATURE) >= _MIN_TEMPERATURE
    lowest = tl.load(lowest_ptr + tl.program_id(0))
    begin = tl.program_id(1) * SPAN
    best = tl.full([LANES], _NONE, WIDE)
    place = tl.zeros([LANES], tl.int32) + begin
    for first in range(begin, tl.minimum(begin + SPAN, vocab), 4 * LANES):
        counter = first // 4 + tl.arange(0, LANES)
        ids = ((counter >> 4) << 6) | (counter & 15)
        words = philox_words(counter, drawn, words_ptr)
        for k in tl.static_range(4):
            score = scores_at(
                ids + 16 * k, vocab, logits_ptr, reals_ptr, words_ptr, bias_ptr, context_ptr,
                counts_ptr, mask_ptr, counted, num_context, drawn, WIDE,
            )  # fmt: skip
            noise = tl.where(is_drawn, gumbel(words[k]), 0.0).to(WIDE)
            score = tl.where(score >= lowest, score + noise, _NONE)
            best, place = better_of(score, ids + 16 * k, best, place)
    top = tl.max(best, 0)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(place_ptr + at, tl.min(tl.where(best == top, place, 2147483647), 0))


@triton.jit
def draft_kernel(
    logits_ptr, row_ptr, drawn_ptr, reals_ptr, words_ptr, ids_ptr, best_ptr, place_ptr,
    vocab, logits_b,
    NUM_REALS: tl.constexpr, NUM_WORDS: tl.constexpr, HAS_MAP: tl.constexpr, SPAN: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same of a drafter: temperature and noise alone, over target ids where it has a map."""
    b = tl.program_id(0)
    row = tl.load(row_ptr + b)
    words_ptr += row * NUM_WORDS
    temperature = tl.load(reals_ptr + row * NUM_REALS + _TEMPERATURE)
    if temperature < _MIN_TEMPERATURE:
        return
    logits_ptr += b.to(tl.int64) * logits_b
    drawn = tl.load(drawn_ptr + b)
    begin = tl.program_id(1) * SPAN
    best = tl.full([LANES], _NONE, WIDE)
    place = tl.zeros([LANES], tl.int32) + begin
    for first in range(begin, tl.minimum(begin + SPAN, vocab), 4 * LANES):
        if HAS_MAP:
            for k in tl.static_range(4):
                at = first + k * LANES + tl.arange(0, LANES)
                logit = tl.load(logits_ptr + at, mask=at < vocab, other=_NONE).to(WIDE)
                ids = tl.load(ids_ptr + at, mask=at < vocab, other=-1).to(tl.int32)
                noise = noise_of(tl.maximum(ids, 0), drawn, words_ptr).to(WIDE)
                score = divide(logit, temperature.to(WIDE), WIDE) + noise
                best, place = better_of(tl.where(ids >= 0, score, _NONE), at, best, place)
        else:
            counter = first // 4 + tl.arange(0, LANES)
            words = philox_words(counter, drawn, words_ptr)
            for k in tl.static_range(4):
                ids = (((counter >> 4) << 6) | (counter & 15)) + 16 * k
                logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=_NONE).to(WIDE)
                score = divide(logit, temperature.to(WIDE), WIDE) + gumbel(words[k]).to(WIDE)
                best, place = better_of(score, ids, best, place)
    top = tl.max(best, 0)
    at = b * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(place_ptr + at, tl.min(tl.where(best == top, place, 2147483647), 0))


@triton.jit
def pick_kernel(
    best_ptr, place_ptr, greedy_ptr, row_ptr, drawn_ptr, reals_ptr, words_ptr, ids_ptr, chosen_ptr,
    num_tokens, spans, vocab,
    NUM_REALS: tl.constexpr, NUM_WORDS: tl.constexpr, HAS_MAP: tl.constexpr,
    FOR_DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of a row's spans, or the greedy token of a row that asks for nothing."""
    at = tl.program_id(0)
    row = tl.load(row_ptr + at // num_tokens)
    chosen = tl.load(greedy_ptr + at)
    reals_ptr += row * NUM_REALS
    if FOR_DRAFT:
        is_asked = tl.load(reals_ptr + _TEMPERATURE) >= _MIN_TEMPERATURE
    else:
        is_asked = is_plain(reals_ptr, words_ptr + row * NUM_WORDS) == 0
    if is_asked:
        span = tl.arange(0, BLOCK)
        best = tl.load(best_ptr + at * spans + span, mask=span < spans, other=_NONE)
        place = tl.load(place_ptr + at * spans + span, mask=span < spans, other=2147483647)
        top = tl.max(best, 0)
        found = tl.minimum(tl.min(tl.where(best == top, place, 2147483647), 0), vocab - 1)
        if HAS_MAP:
            found = tl.load(ids_ptr + found).to(tl.int32)
        if FOR_DRAFT:
            found = tl.where(top > _NONE, found, chosen)
        chosen = found.to(chosen.dtype)
    tl.store(chosen_ptr + at, chosen)


# --- log-probabilities ---


@triton.jit
def logprobs_kernel(
    logits_ptr, chosen_ptr, row_ptr, words_ptr, value_ptr, id_ptr, own_ptr,
    num_tokens, vocab, logits_b, logits_s, value_tokens,
    NUM_WORDS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row: log-softmax at the chosen token and, one pass each, at the best ones."""
    at = tl.program_id(0)
    b, s = at // num_tokens, at % num_tokens
    row = tl.load(row_ptr + b)
    asked = tl.load(words_ptr + row * NUM_WORDS + _LOGPROBS)
    if asked <= 0:
        tl.store(own_ptr + at, 0.0)
        return
    logits_ptr += b.to(tl.int64) * logits_b + s * logits_s
    best_V = tl.full([BLOCK], _NONE, WIDE)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=_NONE).to(WIDE)
        best_V = tl.maximum(best_V, logit)
    best = tl.max(best_V, 0)
    mass_V = tl.zeros([BLOCK], WIDE)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=_NONE).to(WIDE)
        mass_V += tl.exp(logit - best)
    offset = best.to(tl.float64) + tl.log(tl.sum(mass_V.to(tl.float64), 0))
    place = row * value_tokens + s
    chosen = tl.load(logits_ptr + tl.load(chosen_ptr + at))
    own = (chosen.to(tl.float64) - offset).to(tl.float32)
    tl.store(own_ptr + at, own)
    tl.store(value_ptr + place * (MOST + 1), own)
    last, last_id = tl.full([], float("inf"), WIDE), tl.full([], -1, tl.int32)
    for n in range(tl.minimum(tl.minimum(asked - 1, MOST), vocab)):
        top_V = tl.full([BLOCK], _NONE, WIDE)
        place_V = tl.full([BLOCK], 2147483647, tl.int32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + ids, mask=ids < vocab, other=_NONE).to(WIDE)
            is_left = (logit < last) | ((logit == last) & (ids > last_id))
            is_better = is_left & (ids < vocab) & ((logit > top_V) | (place_V == 2147483647))
            top_V = tl.where(is_better, logit, top_V)
            place_V = tl.where(is_better, ids, place_V)
        last = tl.max(top_V, 0)
        last_id = tl.min(tl.where(top_V == last, place_V, 2147483647), 0)
        tl.store(
            value_ptr + place * (MOST + 1) + 1 + n, (last.to(tl.float64) - offset).to(tl.float32)
        )
        tl.store(id_ptr + place * MOST + n, last_id)
