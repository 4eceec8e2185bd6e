"""The definition of `head_linear`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._tensors import wide_dtype


def head_linear_reference(x: Tensor, weight_NKO: Tensor) -> Tensor:
    """Multiply each head's rows by its own matrix.

    Args:
        x: [.., N, K], any strides.
        weight_NKO: [N, K, O], any strides, dtype of x: a part of a projection's weight as it lies.
    Returns:
        [.., N, O], contiguous, dtype of x; sums in float32 (float64 for float64).
    """
    wide = wide_dtype(x.dtype)
    product = torch.einsum("...nk,nko->...no", x.to(wide), weight_NKO.to(wide))
    return product.to(x.dtype).contiguous()
