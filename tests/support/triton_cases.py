"""Launches of every Triton kernel at real sizes, on meta tensors: what `triton_aot.py` compiles.

Llama-3.1-8B's shape (8 KV heads of 4 query heads, 128 wide, vocabulary 128256) unless said
otherwise; bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compilespec.ops.argmax_linear import kernel as head
from compilespec.ops.causal_conv import kernel as conv
from compilespec.ops.ngram_match import kernel as ngram
from compilespec.ops.paged_attention import flash
from compilespec.ops.paged_attention import kernel as paged_attention
from compilespec.ops.quantized_linear import kernel as quantized
from compilespec.ops.recurrence import kernel as state
from compilespec.ops.roll_window import kernel as ring
from compilespec.ops.sample import kernel as sampling
from compilespec.ops.sample import layout
from compilespec.ops.suffix_match import kernel as suffix

Launch = Callable[[], Any]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def int32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def attention(
    batch: int,
    num_tokens: int,
    *,
    num_kv_heads: int = 8,
    group: int = 4,
    head_dim: int = 128,
    value_dim: int = 128,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    latent: bool = False,
    path_size: int = 0,
    is_block: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Launch:
    """4096 tokens of context at most, in blocks of 16; a tree's nodes if `path_size` is given, or
    the rows of a block.
    """
    num_heads = num_kv_heads * group

    def call() -> Tensor:
        heads = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_dim))
        query, key, value = (
            meta(batch, num_tokens, count, width, dtype=dtype).transpose(1, 2)
            for count, width in heads
        )
        caches = [meta(4096, 16, num_kv_heads, n, dtype=dtype) for n in (head_dim, value_dim)]
        if latent:
            return paged_attention.paged_attention(
                query, key, None, caches[0], None, *(int32(batch, num_tokens) for _ in range(3)),
                int32(65, 256), head_dim**-0.5, window, softcap, None, value_dim,
            )  # fmt: skip
        places = (int32(batch, num_tokens) for _ in range(3))
        sink = meta(num_heads, dtype=dtype) if sinks else None
        path = int32(batch, num_tokens, path_size) if path_size else None
        return paged_attention.paged_attention(
            query, key, value, *caches, *places, int32(65, 256), head_dim**-0.5, window, softcap,
            sink, 0, path, int32(batch, num_tokens) if is_block else None,
        )  # fmt: skip

    return call


def runs(batch: int, num_tokens: int) -> Launch:
    places = int32(batch, num_tokens), int32(batch, num_tokens)
    return lambda: flash.find_runs(*places, int32(65, 256), 4096, 16)


def sample(batch: int, num_tokens: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    ids = int32(batch, num_tokens) if num_tokens > 1 else None  # a prompt is written by the host
    places = int32(batch, num_tokens)
    row = meta(batch, dtype=torch.int64)
    real, whole, bias = request_rows(vocab)
    logits, mask = meta(batch, num_tokens, vocab, dtype=dtype), int32(65, 6, -(-vocab // 32))
    return lambda: sampling.sample(
        logits, places, ids, row, places, real, whole, bias, int32(65, 4096), mask
    )


def draw(vocab: int, *, mapped: bool, dtype: torch.dtype = torch.bfloat16) -> Launch:
    ids = meta(vocab, dtype=torch.int64) if mapped else None
    row, (real, whole, _) = meta(8, dtype=torch.int64), request_rows(vocab)
    logits = meta(8, vocab, dtype=dtype)
    return lambda: sampling.draw(logits, int32(8), ids, row, int32(8), real, whole)


def logprobs(dtype: torch.dtype = torch.bfloat16) -> Launch:
    values = meta(65, 6, layout.MAX_LOGPROBS + 1, dtype=torch.float32)
    row, logits = meta(8, dtype=torch.int64), meta(8, 6, VOCAB, dtype=dtype)
    return lambda: sampling.note_logprobs(
        logits, int32(8, 6), row, request_rows(VOCAB)[1], values, int32(65, 6, layout.MAX_LOGPROBS)
    )


def request_rows(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    real = meta(65, layout.NUM_FLOATS, dtype=torch.float32)
    return real, int32(65, layout.NUM_INTS), meta(65, vocab, dtype=torch.float32)


def best_of_head(rows: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    x, weight = meta(rows, 4096, dtype=dtype), meta(VOCAB, 4096, dtype=dtype)
    return lambda: head.argmax_linear(x, weight, None)


def scored_head(rows: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    x, weight = meta(rows, 96, dtype=dtype), meta(997, 96, dtype=dtype)
    return lambda: head.score_linear(x, weight, meta(997, dtype=dtype), int32(rows))


def recurrence(
    batch: int,
    num_tokens: int,
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    per_key: bool = False,
    beta: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Launch:
    """Three kept tokens, 64 requests."""
    size = (batch, num_tokens)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    keys = meta(*size, 2 * key_heads, key_dim, dtype=dtype)
    value, decay = (
        meta(*size, heads, value_dim, dtype=dtype),
        meta(*size, heads, *([key_dim] if per_key else []), dtype=wide),
    )
    width = key_heads * key_dim + decay[0, 0].numel() + heads * (value_dim + beta)
    return lambda: state.cached_recurrence(
        keys[:, :, :key_heads], keys[:, :, key_heads:], value, decay,
        meta(*size, heads, dtype=dtype) if beta else None,
        meta(64, heads, key_dim, value_dim, dtype=wide), meta(64, 3, width, dtype=wide),
        int32(*size), int32(*size), int32(*size), meta(*size, dtype=torch.bool), "",
    )  # fmt: skip


def convolution(batch: int, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    size = (batch, num_tokens)
    x, weight = meta(*size, 8192, dtype=dtype), meta(8192, 4, dtype=dtype)
    return lambda: conv.cached_conv(
        x,
        weight,
        meta(8192, dtype=dtype),
        meta(64, 6, 8192, dtype=dtype),
        int32(*size),
        int32(*size),
    )


def quantized_linear(
    rows: int, weight: torch.dtype, groups: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Launch:
    x, scale = meta(rows, 4096, dtype=dtype), meta(14336, groups)
    return lambda: quantized.quantized_linear(x, meta(14336, 4096, dtype=weight), scale, None, 8)


def four_bits(rows: int, groups: int = 64, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """With zero points, as `"int4_weight_only"` has them."""
    x, scale, zero = meta(rows, 4096, dtype=dtype), meta(14336, groups), meta(14336, groups)
    packed = meta(14336, 2048, dtype=torch.uint8)
    return lambda: quantized.int4_linear(x, packed, scale, None, zero)


VOCAB = 128256
COMMON: dict[str, Launch] = {  # what every test run compiles
    "attention, verify, one request": attention(1, 6),
    "head, one request": best_of_head(6),
    "recurrence, gated delta rule": recurrence(1, 4, 32, 16, 128, 128),
}
OTHERS: dict[str, Launch] = {
    "attention, plain decoding": attention(1, 1),
    "attention, verify, 64 requests": attention(64, 6),
    "attention, prefill": attention(1, 2048),
    "attention, trees": attention(8, 33, path_size=6),
    "attention, blocks": attention(8, 16, path_size=16, is_block=True),
    "attention, window and sinks": attention(4, 4, group=8, head_dim=64, value_dim=64, window=128,
                                             sinks=True),
    "attention, soft cap": attention(2, 4, num_kv_heads=4, group=2, head_dim=256, value_dim=256,
                                     softcap=50.0, window=4096),
    "attention, latent heads": attention(1, 4, num_kv_heads=128, group=1, head_dim=192),
    "attention, latents": attention(8, 4, num_kv_heads=1, group=128, head_dim=576, value_dim=512,
                                    latent=True),
    "attention, latents, one token": attention(1, 1, num_kv_heads=1, group=128, head_dim=576,
                                               value_dim=512, latent=True),
    "attention, awkward heads": attention(3, 9, num_kv_heads=1, group=7, head_dim=80, value_dim=48,
                                          dtype=torch.float16),
    "attention by a library": runs(64, 6),
    "attention by a library, prefill": runs(1, 2048),
    "sample": sample(8, 6, VOCAB),
    "sample, prefill": sample(8, 1, VOCAB),
    "sample, float64": sample(8, 6, 997, torch.float64),
    "draw": draw(VOCAB, mapped=False),
    "draw, mapped": draw(32000, mapped=True),
    "draw, float64": draw(997, mapped=True, dtype=torch.float64),
    "logprobs": logprobs(),
    "logprobs, float64": logprobs(torch.float64),
    "head, one row": best_of_head(1),
    "head, 48 rows": best_of_head(48),
    "head, 384 rows": best_of_head(384),
    "head, rows of logits": lambda: head.row_argmax(meta(8, 6, VOCAB)),
    "head, scores": scored_head(6),
    "head, float32": scored_head(6, torch.float32),
    "head, float64": scored_head(6, torch.float64),
    "quantized, float8, 6 rows": quantized_linear(6, torch.float8_e4m3fn),
    "quantized, float8, 384 rows": quantized_linear(384, torch.float8_e4m3fn),
    "quantized, int8 in groups": quantized_linear(48, torch.int8, groups=32),
    "quantized, four bits, 6 rows": four_bits(6),
    "quantized, four bits, 384 rows": four_bits(384),
    "quantized, four bits, groups of 32": four_bits(48, groups=128),
    "quantized, four bits, float32": four_bits(6, dtype=torch.float32),
    "quantized, float32": quantized_linear(6, torch.int8, dtype=torch.float32),
    "n-gram": lambda: ngram.ngram_match(int32(8, 4096), int32(8), 5, 3, 1),
    "suffix": lambda: suffix.suffix_match(
        int32(8, 4096), int32(8), int32(16, 4096), 4, 16, 1, 151936),
    "ring": lambda: ring.roll_window(
        meta(65, 3, 7168), int32(65, 3), meta(8, dtype=torch.int64), meta(8, 4, 7168),
        int32(8, 4), int32(8)),
    "recurrence, a prompt": recurrence(1, 2048, 32, 16, 128, 128),
    "recurrence, per key": recurrence(8, 4, 32, 32, 128, 128, per_key=True),
    "recurrence, Mamba-2": recurrence(8, 4, 128, 8, 128, 64, beta=False),
    "recurrence, Mamba": recurrence(8, 4, 5120, 1, 16, 1, per_key=True, beta=False),
    "recurrence, float64": recurrence(2, 4, 6, 3, 48, 80, dtype=torch.float64),
    "convolution": convolution(8, 4),
    "convolution, a prompt": convolution(1, 2048),
    "convolution, float64": convolution(2, 1, torch.float64),
    "attention, float32": attention(2, 4, group=3, head_dim=96, dtype=torch.float32),
    "attention, float64": attention(2, 4, group=3, head_dim=96, dtype=torch.float64),
}  # fmt: skip


def all_cases() -> dict[str, Launch]:
    return COMMON | OTHERS


def common_cases() -> dict[str, Launch]:
    return COMMON
