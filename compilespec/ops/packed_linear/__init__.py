"""Linear layer over a packed weight: a few rows cost as much as one, and rows are independent.

On the CPU (`kernel.cpp`) every output element is one chain of fused multiply-adds over k = 0..K-1
in float32 (float64 for float64), or of dot products of pairs or of blocks of 32 where the CPU
multiplies bfloat16 so, rounded once: its bits do not depend on the number of rows, the batch or the
threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.packed_linear.reference import pack_weight as _pack_weight_reference
from compilespec.ops.packed_linear.reference import (
    packed_linear_reference,
    unpack_weight,
)

__all__ = ["pack_weight", "packed_linear", "packed_linear_reference", "unpack_weight"]


def _packed_linear_fake(
    x: Tensor, packed: Tensor, bias_N: Tensor | None, out_features: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


pack_weight = define_op(
    _pack_weight_reference,
    _pack_weight_reference,
    has_kernel=False,
)
packed_linear = define_op(
    packed_linear_reference,
    _packed_linear_fake,
    has_kernel=True,
    tags=(torch.Tag.flexible_layout,),
)
