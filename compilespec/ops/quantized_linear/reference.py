"""The definition of products with quantised weights, in plain torch, and their packed layouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec.ops.packed_linear.reference import PANEL, pack_weight, unpack_weight

QUAD = 4  # k steps of one integer dot product; kernel.cpp has the same constant
NIBBLES = 32  # neighbours that `pack_nibbles` takes together
LEAST_SCALE = torch.finfo(torch.float32).eps


def quantized_linear_reference(
    x: Tensor,
    weight_NK: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    bits: int,
    zero_NG: Tensor | None = None,
) -> Tensor:
    """Compute x @ ((weight - zero) * scale).T + bias in float32, rounded once.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight_NK: int8, or float8_e4m3fn with one group.
        scale_NG: any floating dtype; column g scales the input features of group g, K / G each, a
            power of two if G > 1.
        bias_N: any floating dtype, or None; added before rounding.
        bits: 8, or 4: all weights are in -8..7 (`pack_int4` stores two in a byte).
        zero_NG: any dtype: the number that stands for 0 in each group, a whole one or not; None: 0.
    Returns: [..., N], contiguous, dtype of x.
    """
    weight, depth = weight_NK.float(), weight_NK.shape[1]
    if zero_NG is not None:
        weight = weight - _widened(zero_NG, depth)
    bias = None if bias_N is None else bias_N.float()
    weight = weight * _widened(scale_NG, depth)
    return F.linear(x.float(), weight, bias).to(x.dtype).contiguous()


def _widened(values_NG: Tensor, depth: int) -> Tensor:
    """A value of every group as float32, one for each input feature if there are several."""
    values, groups = values_NG.float(), values_NG.shape[1]
    return values.repeat_interleave(depth // groups, 1) if groups > 1 else values


def packed_quantized_linear_reference(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    zero: Tensor | None = None,
) -> Tensor:
    """`quantized_linear` from packed weights and scales.

    Args:
        packed: int8 or float8_e4m3fn [panels, K, 16] (`pack_bytes`), uint8 [panels, K, 8]
        (`pack_int4`).
        scale: float32 [panels, groups, 16] (`pack_scale`); zero: the same, or None.
    """
    bits = 4 if packed.dtype == torch.uint8 else 8
    weight_NK = (
        unpack_int4(packed, out_features) if bits == 4 else unpack_bytes(packed, out_features)
    )
    zero_NG = None if zero is None else unpack_weight(zero, out_features)
    return quantized_linear_reference(
        x, weight_NK, unpack_weight(scale, out_features), bias_N, bits, zero_NG
    )


def int4_linear_reference(
    x: Tensor,
    packed: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    zero_NG: Tensor | None = None,
) -> Tensor:
    """`quantized_linear` from weights of four bits, packed by `pack_nibbles`."""
    return quantized_linear_reference(x, unpack_nibbles(packed), scale_NG, bias_N, 4, zero_NG)


def dynamic_int8_linear_reference(
    x: Tensor, weight_NK: Tensor, scale_N1: Tensor, bias_N: Tensor | None
) -> Tensor:
    """Quantise each row of x to int8, multiply in integers, scale by row, then by column.

    A row's scale is its largest magnitude over 127.5, in the dtype of x and at least 2^-23; the
    sums scaled by it are rounded to the dtype of x.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight_NK: int8; scale_N1: any floating dtype; bias_N: any floating dtype, or None.
    Returns: [..., N], contiguous, dtype of x.
    Source: torchao's Int8Tensor with dynamic activations (per row, symmetric).
    """
    largest = x.abs().amax(-1, keepdim=True)
    row_scale = (largest / 127.5).clamp(min=LEAST_SCALE).float()
    ints = (x * (1 / row_scale)).round().clamp(-128, 127)
    dots = ints.double() @ weight_NK.double().t()  # integers: exact
    y = (dots.float() * row_scale).to(x.dtype).float() * scale_N1.float().flatten()
    y = y if bias_N is None else y + bias_N.float()
    return y.to(x.dtype).contiguous()


def packed_dynamic_int8_linear_reference(
    x: Tensor, packed: Tensor, scale: Tensor, bias_N: Tensor | None, out_features: int
) -> Tensor:
    """`dynamic_int8_linear` from a weight packed by `pack_quads` and scales by `pack_scale`."""
    weight_NK = unpack_quads(packed, out_features, x.shape[-1])
    return dynamic_int8_linear_reference(x, weight_NK, unpack_weight(scale, out_features), bias_N)


def pack_bytes(weight_NK: Tensor) -> Tensor:
    """A one-byte dtype [N, K] in panels: [ceil(N / 16), K, 16]."""
    return pack_weight(weight_NK.view(torch.int8)).view(weight_NK.dtype)


def unpack_bytes(packed: Tensor, out_features: int) -> Tensor:
    """Invert `pack_bytes`."""
    return unpack_weight(packed.view(torch.int8), out_features).contiguous().view(packed.dtype)


def pack_int4(weight_NK: Tensor) -> Tensor:
    """int8 [N, K] of -8..7 as uint8 [ceil(N / 16), K, 8]: columns j and j + 8 of a panel share a
    byte, j in its low half.
    """
    halves = pack_weight(weight_NK).view(torch.uint8) & 15
    return (halves[..., : PANEL // 2] | halves[..., PANEL // 2 :] << 4).contiguous()


def unpack_int4(packed: Tensor, out_features: int) -> Tensor:
    """Invert `pack_int4`."""
    halves = torch.cat([packed & 15, packed >> 4], -1).view(torch.int8)
    return unpack_weight(torch.where(halves > 7, halves - 16, halves), out_features)


def pack_nibbles(weight_NK: Tensor) -> Tensor:
    """int8 [N, K] of -8..7, K a multiple of 32, as uint8 [N, K / 2]: of 32 neighbours, i and i + 16
    share a byte, i in its low half.  Rows stay rows: for GPUs, which read many at once.
    """
    num_columns, depth = weight_NK.shape
    halves = (weight_NK.view(torch.uint8) & 15).view(num_columns, depth // NIBBLES, 2, NIBBLES // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(num_columns, depth // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert `pack_nibbles`."""
    num_columns, num_bytes = packed.shape
    bytes_ = packed.view(num_columns, -1, NIBBLES // 2)
    halves = torch.stack([bytes_ & 15, bytes_ >> 4], 2).view(num_columns, 2 * num_bytes)
    wide = halves.to(torch.int8)
    return torch.where(wide > 7, wide - 16, wide)


def pack_scale(scale_NG: Tensor) -> Tensor:
    """Scales or zero points [N, groups] as float32 [ceil(N / 16), groups, 16]."""
    return pack_weight(scale_NG.float())


def pack_quads(weight_NK: Tensor) -> Tensor:
    """int8 [N, K] as [ceil(N / 16), ceil(K / 4), 16, 4]: four k steps of a column side by side."""
    num_columns, depth = weight_NK.shape
    padded = F.pad(weight_NK, (0, -depth % QUAD, 0, -num_columns % PANEL))
    quads = padded.view(-(-num_columns // PANEL), PANEL, -(-depth // QUAD), QUAD)
    return quads.transpose(1, 2).contiguous()


def unpack_quads(packed: Tensor, out_features: int, depth: int) -> Tensor:
    """Invert `pack_quads`."""
    padded = packed.transpose(1, 2).reshape(packed.shape[0] * PANEL, -1)
    return padded[:out_features, :depth]
