"""cached_conv in Triton: each program has one token and a block of channels.

A second launch writes the ring: by then all of the first have read it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops._tensors import dense_rows, wide_dtype
from compilespec.ops.recurrence.kernel import part_of

_CHANNELS = 512  # of a program
_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def cached_conv(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    recent_RPC: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
) -> Tensor:
    """See `cached_conv_reference`; a row outside the ring counts as -1."""
    batch, num_tokens, channels = x_BSC.shape
    out = torch.empty_like(x_BSC, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    x = part_of(x_BSC.unsqueeze(2))
    row, position = row_BS.contiguous(), position_BS.contiguous()
    grid = (batch * num_tokens, triton.cdiv(channels, _CHANNELS))
    counts = (batch * num_tokens, num_tokens, *recent_RPC.shape[:2])
    weight, bias = dense_rows(weight_CW), weight_CW if bias_C is None else bias_C.contiguous()
    conv_kernel[grid](
        x, weight, bias, recent_RPC, row, position, out, *counts, weight.stride(0),
        CHANNELS=channels, WIDTH=weight.shape[1], HAS_BIAS=bias_C is not None, BLOCK=_CHANNELS,
        WIDE=_TYPES[wide_dtype(x_BSC.dtype)],
    )  # fmt: skip
    if recent_RPC.shape[1]:
        write_kernel[grid](
            x, recent_RPC, row, position, *counts, CHANNELS=channels, BLOCK=_CHANNELS
        )
    return out


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_batch", "num_rows", "num_kept"])
def conv_kernel(
    x, weight_ptr, bias_ptr, recent_ptr, row_ptr, position_ptr, out_ptr,
    num_tokens, tokens_per_batch, num_rows, num_kept, weight_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.load(row_ptr + token).to(tl.int64)
    is_live = (row >= 0) & (row < num_rows)
    position = tl.load(position_ptr + token)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = (c < CHANNELS) & is_live
    total = tl.zeros([BLOCK], WIDE)
    for w in tl.static_range(WIDTH):
        back = WIDTH - 1 - w
        before = tl.maximum(token - back, 0)
        is_new = (token >= back) & (tl.load(row_ptr + before) == row)
        b = (before // tokens_per_batch).to(tl.int64)
        s = (before % tokens_per_batch).to(tl.int64)
        new = tl.load(x.data + b * x.b + s * x.s + c, mask=is_inside & is_new, other=0.0)
        is_old = (is_new == 0) & (position >= back)
        cell = row * num_kept + (position - back + num_kept) % tl.maximum(num_kept, 1)
        old = tl.load(recent_ptr + cell * CHANNELS + c, mask=is_inside & is_old, other=0.0)
        weight = tl.load(weight_ptr + c * weight_stride + w, mask=is_inside, other=0.0)
        total += tl.where(is_new, new, old).to(WIDE) * weight.to(WIDE)
    if HAS_BIAS:
        total += tl.load(bias_ptr + c, mask=is_inside, other=0.0).to(WIDE)
    at = out_ptr + token.to(tl.int64) * CHANNELS + c
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=c < CHANNELS)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_batch", "num_rows", "num_kept"])
def write_kernel(
    x, recent_ptr, row_ptr, position_ptr, num_tokens, tokens_per_batch, num_rows, num_kept,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.load(row_ptr + token).to(tl.int64)
    if (row < 0) | (row >= num_rows):
        return
    later = token + num_kept
    if tl.load(row_ptr + later, mask=later < num_tokens, other=-1) == row:
        return  # that token has its place in the ring
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = (token // tokens_per_batch).to(tl.int64)
    s = (token % tokens_per_batch).to(tl.int64)
    new = tl.load(x.data + b * x.b + s * x.s + c, mask=c < CHANNELS, other=0.0)
    cell = row * num_kept + tl.load(position_ptr + token) % tl.maximum(num_kept, 1)
    tl.store(recent_ptr + cell * CHANNELS + c, new, mask=c < CHANNELS)
