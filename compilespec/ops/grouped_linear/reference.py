"""The definition of products of grouped weights with rows that are quantized, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec.ops.packed_linear.reference import PANEL, unpack_weight

BLOCK = 32  # neighbours of a row of x that share a scale; kernel.cpp has the same constant
QUAD = 4  # k steps of one integer dot product
_LARGEST = 127.0


def grouped_linear_reference(
    x: Tensor,
    weight_NK: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    bits: int,
    zero_NG: Tensor | None = None,
) -> Tensor:
    """Compute quantized(x) @ ((weight - zero) * scale).T + bias; sums are float32, in order of k.

    Each 32 neighbours of a row of x are rounded to -127..127 times their largest magnitude / 127.

    Args:
        x: [..., K], float32, bfloat16 or float16; K is a multiple of 32.
        weight_NK: int8; of 4 bits all are in -8..7.
        scale_NG: any floating dtype; column g scales the input features of group g, K / G each: a
            power of two, at least 32, or 16 for weights of 8 bits.
        bias_N: any floating dtype, or None; added before rounding.
        bits: 4 or 8.
        zero_NG: any dtype: the number that stands for 0 in each group; None: 0.
    Returns: [..., N], contiguous, dtype of x.
    Source: llama.cpp's products of Q4_1 and Q8_0 with rows in Q8_1.
    """
    depth, groups = weight_NK.shape[1], scale_NG.shape[1]
    ints, row_scale = quantize_blocks(x)
    part = min(BLOCK, depth // groups)  # k steps that share both scales
    x_parts = ints.double().unflatten(-1, (-1, part))
    w_parts = weight_NK.double().unflatten(-1, (-1, part))
    dots = torch.einsum("...pk,npk->...np", x_parts, w_parts)  # integers: exact
    own = depth // groups // part
    if zero_NG is not None:
        zeros = zero_NG.double().repeat_interleave(own, 1)
        dots = dots - zeros * x_parts.sum(-1).unsqueeze(-2)
    scales = scale_NG.double().repeat_interleave(own, 1)
    x_scales = row_scale.double().repeat_interleave(BLOCK // part, -1).unsqueeze(-2)
    y = (dots * scales * x_scales).sum(-1).float()
    y = y if bias_N is None else y + bias_N.float()
    return y.to(x.dtype).contiguous()


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(integers as float32 [..., K], scales [..., K / 32]) of rows; NaN where a block has one or
    an infinity.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    scale = torch.where(largest.isfinite(), largest / _LARGEST, torch.nan)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    ints = (blocks * inverse.unsqueeze(-1)).round().clamp(-_LARGEST, _LARGEST)
    return ints.nan_to_num(0.0).flatten(-2), scale


def packed_grouped_linear_reference(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    zero: Tensor | None = None,
) -> Tensor:
    """`grouped_linear` from packed weights and scales.

    Args:
        packed: uint8 [panels, K / 8, 16, 4] (`pack_quad_nibbles`: 4 bits) or [panels, K / 4, 16, 4]
            (`pack_quad_bytes`: 8 bits).
        scale: float32 or bfloat16 [panels, groups, 16]; zero: the same, or None.
    """
    bits = 4 if packed.shape[1] * 2 * QUAD == x.shape[-1] else 8
    unpack = unpack_quad_nibbles if bits == 4 else unpack_quad_bytes
    weight_NK = unpack(packed, out_features)
    zero_NG = None if zero is None else unpack_weight(zero, out_features)
    scale_NG = unpack_weight(scale, out_features)
    return grouped_linear_reference(x, weight_NK, scale_NG, bias_N, bits, zero_NG)


def pack_groups(values_NG: Tensor) -> Tensor:
    """Scales or zero points [N, groups] as [ceil(N / 16), groups, 16]; bfloat16 as it is, others as
    float32.
    """
    values = values_NG if values_NG.dtype == torch.bfloat16 else values_NG.float()
    padded = F.pad(values, (0, 0, 0, -len(values) % PANEL))
    return padded.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()


def pack_quad_bytes(weight_NK: Tensor) -> Tensor:
    """int8 [N, K] plus 128 as uint8 [ceil(N / 16), K / 4, 16, 4]: four k steps of a column side by
    side.
    """
    num_columns, depth = weight_NK.shape
    shifted = weight_NK.view(torch.uint8) ^ 128
    padded = F.pad(shifted, (0, 0, 0, -num_columns % PANEL), value=128)
    return padded.view(-1, PANEL, depth // QUAD, QUAD).transpose(1, 2).contiguous()


def unpack_quad_bytes(packed: Tensor, out_features: int) -> Tensor:
    """Invert `pack_quad_bytes`."""
    return (packed ^ 128).view(torch.int8).transpose(1, 2).reshape(
        packed.shape[0] * PANEL, -1
    )[:out_features]  # fmt: skip


def pack_quad_nibbles(weight_NK: Tensor) -> Tensor:
    """int8 [N, K] of -8..7, plus 8, as uint8 [ceil(N / 16), K / 8, 16, 4]: of the eight quads of 32
    k steps, i (low halves of bytes) and i + 4 (high halves) share 64 bytes.
    """
    quads = pack_quad_bytes(weight_NK) - 120  # 128 + w - 120 = w + 8
    low, high = quads.unflatten(1, (-1, 2, BLOCK // QUAD // 2)).unbind(2)
    return (low | high << 4).flatten(1, 2).contiguous()


def unpack_quad_nibbles(packed: Tensor, out_features: int) -> Tensor:
    """Invert `pack_quad_nibbles`."""
    blocks = packed.unflatten(1, (-1, BLOCK // QUAD // 2))
    quads = torch.stack([blocks & 15, blocks >> 4], 2).flatten(1, 3)
    return unpack_quad_bytes(quads + 120, out_features)
