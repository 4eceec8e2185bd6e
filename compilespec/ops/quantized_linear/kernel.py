"""quantized_linear in Triton: weights are widened in registers, and scales multiply the sums.

A program multiplies a block of weight rows with all tokens (at most 128 at a time), so that the
small weight is read once and no wide copy of it exists.  Safe in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops.quantized_linear.reference import quantized_linear_reference

_LEAST_GROUP = 16  # input features of a block product


def quantized_linear(
    x: Tensor, weight_NK: Tensor, scale_NG: Tensor, bias_N: Tensor | None, bits: int
) -> Tensor:
    """See `quantized_linear_reference`; narrower groups than 16 are its own business."""
    num_outputs, depth = weight_NK.shape
    groups = scale_NG.shape[1]
    if depth // groups < _LEAST_GROUP or x.dtype == torch.float64:
        return quantized_linear_reference(x, weight_NK, scale_NG, bias_N, bits)
    rows = x.reshape(-1, depth)
    out = x.new_empty((*x.shape[:-1], num_outputs))
    count = rows.shape[0]
    if count == 0:
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    is_float8 = weight_NK.dtype == torch.float8_e4m3fn
    by_bits = is_float8 and not _widens_float8(x)
    weight_NK = (weight_NK.view(torch.uint8) if by_bits else weight_NK).contiguous()
    block_m, block_n, block_k, num_warps, num_stages = choose_blocks(count, x.dtype)
    linear_kernel[(triton.cdiv(count, block_m), triton.cdiv(num_outputs, block_n))](
        rows, weight_NK, scale_NG.contiguous(),
        scale_NG if bias_N is None else bias_N.contiguous(), out,
        count, num_outputs, rows.stride(0),
        DEPTH=depth, GROUPS=groups, HAS_BIAS=bias_N is not None, BY_BITS=by_bits,
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
    """Whether the GPU has an instruction for it: from sm_89 on."""
    if x.device.type == "cpu":
        return False
    return int(triton.runtime.driver.active.get_current_target().arch) >= 89


def _even_part(size: int) -> int:
    """The largest power of two up to `size` such that blocks of it end where groups end; for one
    group that has none, any: the last block is masked.
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


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_rows, num_outputs, x_row,
    DEPTH: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = m < num_rows, n < num_outputs
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
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
        part_MN = tl.dot(x_MK, tl.trans(weight_NK.to(tl.float32).to(dtype)), input_precision="ieee")
        if GROUPS > 1:
            group = first // (DEPTH // GROUPS)
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
