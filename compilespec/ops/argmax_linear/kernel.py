"""argmax_linear and score_linear in Triton: one block of the vocabulary per program.

A program multiplies its rows of the weight with all tokens (at most 128 at a time), rounds as the
product would, and keeps each token's best logit and its index; a second kernel takes the best of
the blocks, the first of equal ones.  Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops._tensors import wide_dtype


def argmax_linear(x: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `argmax_linear_reference`."""
    return _run(x, weight_VD, bias_V, None)[:2]


def row_argmax(x: Tensor) -> Tensor:
    """See `row_argmax_reference`."""
    columns, wide = x.shape[-1], wide_dtype(x.dtype)
    argmax = x.new_empty(x.shape[:-1], dtype=torch.int64)
    count = argmax.numel()
    if count == 0:
        return argmax
    rows = x.reshape(count, columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    spans = triton.cdiv(columns, SPAN)
    best, largest = x.new_empty((count, spans), dtype=wide), x.new_empty(count)
    place = x.new_empty((count, spans), dtype=torch.int32)
    span_kernel[(count, spans)](
        rows, best, place, columns, rows.stride(0), SPAN=SPAN, WIDE=_TYPES[wide]
    )
    merge_kernel[(count,)](
        best, place, best, argmax, largest, best, spans, columns, SCORES=False,
        BLOCK=triton.next_power_of_2(spans),
    )  # fmt: skip
    return argmax


def score_linear(
    x: Tensor, weight_VD: Tensor, bias_V: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `score_linear_reference`."""
    argmax, _, total, picked = _run(x, weight_VD, bias_V, ids)
    return argmax, total, picked


def _run(
    x: Tensor, weight_VD: Tensor, bias_V: Tensor | None, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Argmax and its logit; log-sum-exp and the logits at `ids` (both empty without ids)."""
    shape, depth, vocab = x.shape[:-1], x.shape[-1], weight_VD.shape[0]
    wide = wide_dtype(x.dtype)
    rows = x.reshape(-1, depth)
    count, scores = rows.shape[0], ids is not None
    argmax, largest = x.new_empty(shape, dtype=torch.int64), x.new_empty(shape)
    total = x.new_empty(shape if scores else (0,), dtype=wide)
    picked = x.new_full(shape if scores else (0,), float("-inf"), dtype=wide)
    if count == 0:
        return argmax, largest, total, picked
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if weight_VD.stride(1) != 1:
        weight_VD = weight_VD.contiguous()
    block_m, block_v, block_k, num_warps, num_stages = choose_blocks(count, x.dtype)
    blocks = triton.cdiv(vocab, block_v)
    best, mass = (x.new_empty((count, blocks), dtype=wide) for _ in range(2))
    place = x.new_empty((count, blocks), dtype=torch.int32)
    block_kernel[(triton.cdiv(count, block_m), blocks)](
        rows, weight_VD, weight_VD if bias_V is None else bias_V.contiguous(),
        place if ids is None else ids.contiguous(), best, place, mass, picked,
        count, vocab, rows.stride(0), weight_VD.stride(0),
        DEPTH=depth, HAS_BIAS=bias_V is not None, SCORES=scores, BLOCK_M=block_m,
        BLOCK_V=block_v, BLOCK_K=block_k, WIDE=_TYPES[wide], num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    merge_kernel[(count,)](
        best, place, mass, argmax, largest, total, blocks, vocab, SCORES=scores,
        BLOCK=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return argmax, largest, total, picked


def choose_blocks(count: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(tokens, weight rows, depth) of a block, warps, stages: the more tokens, the more reuse."""
    if dtype.itemsize > 2:
        return 16, 64, 32, 4, 2
    tokens = max(16, min(triton.next_power_of_2(count), 128))
    return (tokens, 64, 128, 4, 4) if tokens <= 32 else (tokens, 128, 64, 8, 3)


SPAN = 4096  # columns of a program of `span_kernel`
_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit(do_not_specialize=["num_rows"])
def block_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, best_ptr, place_ptr, mass_ptr, picked_ptr,
    num_rows, vocab, x_row, weight_row,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, SCORES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_id = m < num_rows, v < vocab
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], WIDE)
    for first in range(0, DEPTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x_MK = tl.load(
            x_ptr + m.to(tl.int64)[:, None] * x_row + k[None, :],
            mask=is_row[:, None] & (k < DEPTH)[None, :], other=0.0,
        )  # fmt: skip
        weight_VK = tl.load(
            weight_ptr + v.to(tl.int64)[:, None] * weight_row + k[None, :],
            mask=is_id[:, None] & (k < DEPTH)[None, :], other=0.0,
        )  # fmt: skip
        acc_MV += tl.dot(x_MK, tl.trans(weight_VK), input_precision="ieee")
    if HAS_BIAS:
        acc_MV += tl.load(bias_ptr + v, mask=is_id, other=0.0).to(WIDE)[None, :]
    logit_MV = acc_MV.to(x_ptr.dtype.element_ty).to(WIDE)  # compared as rounded
    logit_MV = tl.where(is_id[None, :], logit_MV, float("-inf"))
    is_nan_MV = logit_MV != logit_MV
    ranked_MV = tl.where(is_nan_MV, float("inf"), logit_MV)
    best_M = tl.max(ranked_MV, 1)
    place_M = tl.min(tl.where(ranked_MV == best_M[:, None], v[None, :], 2147483647), 1)
    best_M = tl.where(tl.max(is_nan_MV.to(tl.int32), 1) != 0, float("nan"), best_M)
    at = m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, best_M, mask=is_row)
    tl.store(place_ptr + at, place_M, mask=is_row)
    if SCORES:
        base_M = tl.where(best_M == float("-inf"), 0.0, best_M)
        tl.store(mass_ptr + at, tl.sum(tl.exp(logit_MV - base_M[:, None]), 1), mask=is_row)
        ids_M = tl.load(ids_ptr + m, mask=is_row, other=-1)
        is_mine_M = (ids_M // BLOCK_V == tl.program_id(1)) & (ids_M >= 0) & (ids_M < vocab)
        mine_M = tl.sum(tl.where(v[None, :] == ids_M[:, None], logit_MV, 0.0), 1)
        tl.store(picked_ptr + m, mine_M, mask=is_mine_M)


@triton.jit
def span_kernel(
    x_ptr, best_ptr, place_ptr, columns, x_row, SPAN: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    is_inside = at < columns
    value = tl.load(x_ptr + row * x_row + at, mask=is_inside, other=float("-inf")).to(WIDE)
    is_nan = value != value
    ranked = tl.where(is_nan, float("inf"), value)
    top = tl.max(ranked, 0)
    place = tl.min(tl.where((ranked == top) & is_inside, at, 2147483647), 0)
    best = tl.where(tl.max(is_nan.to(tl.int32), 0) != 0, float("nan"), top)
    index = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + index, best)
    tl.store(place_ptr + index, place)


@triton.jit
def merge_kernel(
    best_ptr, place_ptr, mass_ptr, argmax_ptr, largest_ptr, total_ptr, blocks, vocab,
    SCORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_block = at < blocks
    best = tl.load(best_ptr + row * blocks + at, mask=is_block, other=float("-inf"))
    place = tl.load(place_ptr + row * blocks + at, mask=is_block, other=2147483647)
    is_nan = best != best
    ranked = tl.where(is_nan, float("inf"), best)
    top = tl.max(ranked, 0)
    found = tl.min(tl.where(ranked == top, place, 2147483647), 0)
    tl.store(argmax_ptr + row, tl.minimum(found, vocab - 1).to(tl.int64))
    top = tl.where(tl.max(is_nan.to(tl.int32), 0) != 0, float("nan"), top)
    tl.store(largest_ptr + row, top.to(largest_ptr.dtype.element_ty))
    if SCORES:
        base = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.load(mass_ptr + row * blocks + at, mask=is_block, other=0.0)
        total = tl.sum(tl.where(mass > 0, mass * tl.exp(best - base), 0.0), 0)
        tl.store(total_ptr + row, tl.log(total) + base)
