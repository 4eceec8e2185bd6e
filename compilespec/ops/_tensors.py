"""Helpers of operators' references and kernels for their input tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, float32 for all narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_rows(x: Tensor) -> Tensor:
    """The same values with a dense last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def outer_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of all dimensions but the last; 0 for one of a single entry, whose stride is
    anything: a kernel that is compiled for some strides shall not see it.
    """
    return tuple(0 if n == 1 else s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))
