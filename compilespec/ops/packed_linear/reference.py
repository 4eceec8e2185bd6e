"""What `packed_linear` computes, in plain torch, and the packed layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec.ops._tensors import wide_dtype

PANEL = 16  # output columns in a panel, unless it is bfloat16; _panels.h has the same constants
BFLOAT16_PANEL = 32
_INTERLEAVED = [  # 0 8 1 9 ... 7 15 16 24 ... 23 31
    first + column // 2 + column % 2 * 8 for first in (0, 16) for column in range(16)
]


def panel_columns(dtype: torch.dtype) -> int:
    """Output columns in a panel of a weight of that dtype."""
    return BFLOAT16_PANEL if dtype == torch.bfloat16 else PANEL


def pack_weight(weight_NK: Tensor) -> Tensor:
    """Rearrange a linear weight so that one step over k reads neighbouring output columns.

    Args:
        weight_NK: [out_features, in_features], any floating dtype and strides.
    Returns:
        [ceil(N / 16), K, 16], or [ceil(N / 32), K, 32] for bfloat16: contiguous, same dtype,
        missing columns zero.  The columns of a bfloat16 panel, a cache line for each k, are stored
        in the order 0 8 1 9 ... 7 15 16 24 ... 23 31: the low and the high halves of 32-bit words
        are neighbours, so that the kernel widens them with a shift and a mask.  It is an ordinary
        tensor, which may be saved, moved and used as a graph input.
    """
    num_columns, depth = weight_NK.shape
    width = panel_columns(weight_NK.dtype)
    num_panels = -(-num_columns // width)
    padded = F.pad(weight_NK, (0, 0, 0, num_panels * width - num_columns))
    panels = padded.view(num_panels, width, depth).transpose(1, 2)
    if weight_NK.dtype == torch.bfloat16:
        return panels[:, :, _INTERLEAVED].contiguous()
    return panels.contiguous() if depth != 1 else panels.reshape(num_panels, depth, width).clone()


def unpack_weight(packed: Tensor, out_features: int) -> Tensor:
    """Invert `pack_weight`: -> [out_features, K]."""
    if packed.dtype == torch.bfloat16:
        packed = packed[:, :, torch.tensor(_INTERLEAVED).argsort().to(packed.device)]
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:out_features]


def packed_linear_reference(
    x: Tensor, packed: Tensor, bias_N: Tensor | None, out_features: int
) -> Tensor:
    """Compute x @ weight.T + bias, accumulated in float32 and rounded once.

    Args:
        x: [..., K], float32, bfloat16 or float16; float64 only together with a float64 weight.
        packed: result of `pack_weight`, in any of these dtypes, on the same device.
        bias_N: [out_features] or None; added before rounding.
        out_features: N, which the padded panels do not determine.
    Returns:
        [..., out_features], contiguous, dtype of x.
    """
    wide = wide_dtype(x.dtype)
    weight_NK = unpack_weight(packed, out_features).to(wide)
    bias_N = None if bias_N is None else bias_N.to(wide)
    return F.linear(x.to(wide), weight_NK, bias_N).to(x.dtype).contiguous()
