"""What operators' references and kernels ask of the tensors that they are given."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float64 for float64, float32 for all narrower ones."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_rows(x: Tensor) -> Tensor:
    """The same values with the last dimension's elements beside each other."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
