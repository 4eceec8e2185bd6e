"""`dynamic_int8_linear` over a library's integer product, in code that Inductor takes apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec import _torch_compat
from compilespec.ops.quantized_linear.reference import LEAST_SCALE

LEAST_ROWS = 17  # of cuBLAS's integer product, as torch calls it
MULTIPLE = 8  # its depths and widths


def dynamic_int8_product(
    x: Tensor, weight_NK: Tensor, scale_N1: Tensor, bias_N: Tensor | None
) -> Tensor:
    """Compute what `reference.dynamic_int8_linear_reference` does, the same bits; for GPUs.

    Rows quantised on the way, the product and both scales are separate operations, so that all but
    the product are fused.
    """
    rows = x.reshape(-1, x.shape[-1])
    ints, row_scale = quantize_rows(rows, rows.abs().amax(-1, keepdim=True))
    y = scale_dots(integer_product(ints, weight_NK), row_scale, scale_N1, bias_N, x.dtype)
    return y.reshape(*x.shape[:-1], weight_NK.shape[0])


def quantize_rows(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in int8, given their largest magnitudes [..., 1], and their scales in float32."""
    row_scale = (largest / 127.5).clamp(min=LEAST_SCALE).float()
    return (x * (1 / row_scale)).round().clamp(-128, 127).to(torch.int8), row_scale


def scale_dots(
    dots: Tensor, row_scale: Tensor, scale_N1: Tensor, bias_N: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums of integers [..., N] as numbers of `dtype`: scaled by row, rounded, scaled by column."""
    y = (dots.float() * row_scale).to(dtype).float() * scale_N1.float().flatten()
    y = y if bias_N is None else y + bias_N.float()
    return y.to(dtype)


def integer_product(ints_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """ints @ weight.T, exact: int32 [M, N].

    The library refuses 16 rows and fewer, and odd sizes, so rows of zeros are added, enough for any
    M, because M is a symbol in a step's graph.
    """
    num_rows, (num_columns, depth) = ints_MK.shape[0], weight_NK.shape
    ints_MK = F.pad(ints_MK, (0, -depth % MULTIPLE, 0, LEAST_ROWS - 1))
    if depth % MULTIPLE or num_columns % MULTIPLE:
        weight_NK = F.pad(weight_NK, (0, -depth % MULTIPLE, 0, -num_columns % MULTIPLE))
    return _torch_compat.int_mm(ints_MK, weight_NK.t())[:num_rows, :num_columns]
