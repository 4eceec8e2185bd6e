"""The definition of `packed_linear`, in plain torch, and the packed layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compilespec.ops._tensors import wide_dtype

PANEL = 16  # output columns in a panel, as in _panels.h


def pack_weight(weight_NK: Tensor) -> Tensor:
    """Rearrange a linear weight so that one step over k reads neighbouring output columns.

    Args:
        weight_NK: [out_features, in_features], any dtype and strides.
    Returns:
        [ceil(N / 16), K, 16], or [ceil(N / 16), ceil(K / 2), 16, 2] for bfloat16: contiguous, same
        dtype, what is missing zero.  The pairs of a bfloat16 panel are what CPUs with dot products
        of pairs multiply; others widen one k step with a shift and the next with a mask.  It is an
        ordinary tensor, which may be saved, moved and used as a graph input.
    """
    num_columns, depth = weight_NK.shape
    held = _steps_held(weight_NK.dtype)
    num_panels, num_strips = -(-num_columns // PANEL), -(-depth // held)
    missing = (0, num_strips * held - depth, 0, num_panels * PANEL - num_columns)
    full = F.pad(weight_NK, missing) if any(missing) else weight_NK.contiguous()
    panels = full.view(num_panels, PANEL, num_strips, held).transpose(1, 2)
    if held == 2 and full.storage_offset() % 2 == 0:
        panels = panels.view(torch.int32)  # a pair moves as a whole, twice as fast
    shape = (num_panels, num_strips, PANEL, held) if held > 1 else (num_panels, num_strips, PANEL)
    packed = panels.clone(memory_format=torch.contiguous_format)
    return packed.view(full.dtype).view(shape)


def unpack_weight(packed: Tensor, out_features: int, in_features: int | None = None) -> Tensor:
    """Invert `pack_weight`: -> [out_features, in_features]; None: all that the strips hold."""
    num_panels, num_strips = packed.shape[:2]
    strips = packed.view(num_panels, num_strips, PANEL, -1).transpose(1, 2)
    return strips.reshape(num_panels * PANEL, -1)[:out_features, :in_features]


def _steps_held(dtype: torch.dtype) -> int:
    """k steps of a strip."""
    return 2 if dtype == torch.bfloat16 else 1


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
    weight_NK = unpack_weight(packed, out_features, x.shape[-1]).to(wide)
    bias_N = None if bias_N is None else bias_N.to(wide)
    return F.linear(x.to(wide), weight_NK, bias_N).to(x.dtype).contiguous()
