"""Gumbel noise by counter: the bits of `noise_bits`, four words per counter."""

from __future__ import annotations

import triton
import triton.language as tl

from compilespec.ops.sample import layout
from compilespec.ops.sample.kernels.requests import SAMPLE, SEED_HIGH, SEED_LOW

STREAM_DRAW = tl.constexpr(layout.STREAM_DRAW)


@triton.jit
def log(x):
    """Logarithm of a positive normal float32 to about one ulp; the hardware's is worse near 1."""
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
    """-log(-log(u)), u = (bits + 1/2) / 2**32; above one half computed from 1 - u."""
    upper = bits.to(tl.int32, bitcast=True) >> 31  # all ones where u > 1/2
    word = bits.to(tl.int32, bitcast=True) ^ upper
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.where(upper != 0, 1.0 - v, v)
    lost, minus_log = 1.0 - u, -log(u)
    # log1p: corrects the rounding of 1 - v in proportion
    precise = tl.where(lost > 0, minus_log * tl.div_rn(v, tl.where(lost > 0, lost, 1.0)), v)
    return -log(tl.where(upper != 0, precise, minus_log))


@triton.jit
def philox_words(place, position, words_ptr):
    """The four words of each counter: ids 64 (place / 16) + 16 k + place % 16, k = 0..3."""
    zero = place.to(tl.uint32) * 0
    return tl.philox_impl(
        place.to(tl.uint32), zero + position.to(tl.uint32),
        zero + tl.load(words_ptr + SAMPLE).to(tl.uint32), zero + STREAM_DRAW,
        tl.load(words_ptr + SEED_LOW).to(tl.uint32), tl.load(words_ptr + SEED_HIGH).to(tl.uint32),
    )  # fmt: skip


@triton.jit
def noise_of(ids, position, words_ptr):
    """Noise of ids in any order: one counter each."""
    w0, w1, w2, w3 = philox_words(((ids >> 6) << 4) | (ids & 15), position, words_ptr)
    k = (ids >> 4) & 3
    return gumbel(tl.where(k < 2, tl.where(k == 0, w0, w1), tl.where(k == 2, w2, w3)))
