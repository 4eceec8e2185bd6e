"""Products of quantized weights in Triton: weights are widened in registers, sums are scaled.

A program multiplies a block of weight rows with all tokens (at most 128 at a time), so that the
small weight is read once and no wide copy of it exists.  Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops.device import traits_of
from compilespec.ops.quantized_linear import reference
from compilespec.ops.quantized_linear.reference import (
    int4_linear_reference,
    quantized_linear_reference,
)

NIBBLES = tl.constexpr(reference.NIBBLES)
_LEAST_GROUP = 16  # input features of a block product


def quantized_linear(
    x: Tensor,
    weight_NK: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    bits: int,
    zero_NG: Tensor | None = None,
) -> Tensor:
    """See `quantized_linear_reference`; the reference serves groups narrower than 16."""
    depth_of_group = weight_NK.shape[1] // scale_NG.shape[1]
    if depth_of_group < _LEAST_GROUP or x.dtype == torch.float64:
        return quantized_linear_reference(x, weight_NK, scale_NG, bias_N, bits, zero_NG)
    is_float8 = weight_NK.dtype == torch.float8_e4m3fn
    by_bits = is_float8 and not _widens_float8(x)
    weight_NK = weight_NK.view(torch.uint8) if by_bits else weight_NK
    return _multiply(x, weight_NK, scale_NG, bias_N, zero_NG, by_bits=by_bits)


def int4_linear(
    x: Tensor,
    packed: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    zero_NG: Tensor | None = None,
) -> Tensor:
    """See `int4_linear_reference`; the reference serves groups that are no multiples of 32."""
    if x.shape[-1] // scale_NG.shape[1] % NIBBLES.value or x.dtype == torch.float64:
        return int4_linear_reference(x, packed, scale_NG, bias_N, zero_NG)
    return _multiply(x, packed.view(torch.int8), scale_NG, bias_N, zero_NG, four_bits=True)


def _multiply(
    x: Tensor,
    weight: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    zero_NG: Tensor | None,
    *,
    by_bits: bool = False,
    four_bits: bool = False,
) -> Tensor:
    num_outputs, depth, groups = weight.shape[0], x.shape[-1], scale_NG.shape[1]
    rows = x.reshape(-1, depth)
    out = x.new_empty((*x.shape[:-1], num_outputs))
    count = rows.shape[0]
    if count == 0:
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    block_m, block_n, block_k, num_warps, num_stages = choose_blocks(count, x.dtype)
    linear_kernel[(triton.cdiv(count, block_m), triton.cdiv(num_outputs, block_n))](
        rows, weight.contiguous(), scale_NG.contiguous(),
        scale_NG if bias_N is None else bias_N.contiguous(),
        scale_NG if zero_NG is None else zero_NG.contiguous(), out,
        count, num_outputs, rows.stride(0),
        DEPTH=depth, GROUPS=groups, HAS_BIAS=bias_N is not None, HAS_ZERO=zero_NG is not None,
        BY_BITS=by_bits, FOUR_BITS=four_bits,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=min(block_k, _even_part(depth // groups)),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def choose_blocks(count: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(tokens, weight rows, depth) of a block, warps, stages."""
    if dtype.itemsize > 2:
        return 16, 32, 32, 4, 2
    tokens = max(16, min(triton.next_power_of_2(count), 128))
    return (tokens, 32, 128, 4, 4) if tokens <= 32 else (tokens, 64, 64, 4, 3)


def _widens_float8(x: Tensor) -> bool:
    """True where the GPU has an instruction to widen float8: from sm_89 on."""
    if traits_of(x.device).is_cpu:
        return False
    return int(triton.runtime.driver.active.get_current_target().arch) >= 89


def _even_part(size: int) -> int:
    """The largest power of two up to `size` such that blocks of it end where groups end; for a
    single group any power: the last block is masked.
    """
    even = size & -size
    return even if even >= _LEAST_GROUP else 1 << 30


@triton.jit
def widen_float8(byte):
    """float8_e4m3fn by its bits, in float32."""
    wide = byte.to(tl.int32)
    rest = wide & 0x7F
    normal = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, normal)  # 2**-9: subnormal
    size = tl.where(rest == 0x7F, float("nan"), size)
    return tl.where(wide >= 128, -size, size)


@triton.jit
def product(x_MK, weight_NK):
    weight_NK = weight_NK.to(tl.float32).to(x_MK.dtype)
    return tl.dot(x_MK, tl.trans(weight_NK), input_precision="ieee")


@triton.jit
def four_bit_part(
    x_ptr, weight_ptr, m, n, first, is_row, is_output, x_row,
    DEPTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of BLOCK_K input features: those in low halves of bytes, and those in high; and
    the sum of those features of each row.
    """
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    half: tl.constexpr = NIBBLES // 2
    k = byte // half * NIBBLES + byte % half
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_row + k[None, :]
    is_x = is_row[:, None] & (k < DEPTH)[None, :]
    bytes_NK = tl.load(
        weight_ptr + n.to(tl.int64)[:, None] * (DEPTH // 2) + byte[None, :],
        mask=is_output[:, None] & (k < DEPTH)[None, :], other=0,
    ).to(tl.int32)  # fmt: skip
    low_MK = tl.load(x_ptrs, mask=is_x, other=0.0)
    high_MK = tl.load(x_ptrs + half, mask=is_x, other=0.0)
    part_MN = product(low_MK, (bytes_NK << 28) >> 28) + product(high_MK, bytes_NK >> 4)
    return part_MN, tl.sum(low_MK.to(tl.float32) + high_MK.to(tl.float32), 1)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, zero_ptr, out_ptr, num_rows, num_outputs, x_row,
    DEPTH: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ZERO: tl.constexpr,
    BY_BITS: tl.constexpr, FOUR_BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = m < num_rows, n < num_outputs
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        if FOUR_BITS:
            part_MN, sum_M = four_bit_part(
                x_ptr, weight_ptr, m, n, first, is_row, is_output, x_row, DEPTH, BLOCK_K
            )
        else:
            k = first + tl.arange(0, BLOCK_K)
            x_MK = tl.load(
                x_ptr + m.to(tl.int64)[:, None] * x_row + k[None, :],
                mask=is_row[:, None] & (k < DEPTH)[None, :], other=0.0,
            )  # fmt: skip
            weight_NK = tl.load(
                weight_ptr + n.to(tl.int64)[:, None] * DEPTH + k[None, :],
                mask=is_output[:, None] & (k < DEPTH)[None, :], other=0.0,
            )  # fmt: skip
            if BY_BITS:
                weight_NK = widen_float8(weight_NK)
            part_MN, sum_M = product(x_MK, weight_NK), tl.sum(x_MK.to(tl.float32), 1)
        group = first // (DEPTH // GROUPS)
        if HAS_ZERO:  # is what the sum of x would add
            zero_N = tl.load(zero_ptr + n * GROUPS + group, mask=is_output, other=0.0)
            part_MN -= sum_M[:, None] * zero_N.to(tl.float32)[None, :]
        if GROUPS > 1:
            part_MN *= tl.load(
                scale_ptr + n * GROUPS + group, mask=is_output, other=0.0
            ).to(tl.float32)[None, :]  # fmt: skip
        acc_MN += part_MN
    if GROUPS == 1:
        acc_MN *= tl.load(scale_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * num_outputs + n[None, :]
    tl.store(out_ptr + at, acc_MN.to(dtype), mask=is_row[:, None] & is_output[None, :])
