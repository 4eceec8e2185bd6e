"""Linear layers over weights of 4 or 8 bits in groups, with rows quantized on the way.

Rows of x become int8 in blocks of 32 with a scale each, and a block of a row meets 32 stored
weights of a column in integers: several rows share one unpacking, and a product costs little more
than reading the weight.  Each row's bits are those it has alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.grouped_linear import reference
from compilespec.ops.grouped_linear.reference import BLOCK, pack_quad_bytes, pack_quad_nibbles

__all__ = ["BLOCK", "grouped_linear", "nested_linear", "pack_quad_bytes", "pack_quad_nibbles"]


def fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def packed_fake(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, out_features: int, *_: Any
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def nested_linear(
    x: Tensor,
    upper_NK: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    zero_NG: Tensor,
    lower_NK: Tensor,
    lower_scale_NG: Tensor,
) -> Tensor:
    """x times a weight in two planes of four bits, which are two products: see `grouped_linear`."""
    above = grouped_linear(x, upper_NK, scale_NG, bias_N, 4, zero_NG)
    return above + grouped_linear(x, lower_NK, lower_scale_NG, None, 4)


_TAGS = (torch.Tag.flexible_layout,)
grouped_linear = define_op(reference.grouped_linear_reference, fake, has_kernel=False, tags=_TAGS)
define_op(reference.packed_grouped_linear_reference, packed_fake, has_kernel=True, tags=_TAGS)
