"""The head's product and its argmax in one operator: logits are never written.

The CPU uses the references, except for `row_argmax` (`kernel.cpp`).  On a GPU (`kernel.py`) each
block of the vocabulary keeps its best logit, so that the head only reads its weight, and writes
nothing that grows with rows times V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops._tensors import wide_dtype
from compilespec.ops.argmax_linear.reference import (
    argmax_linear_reference,
    row_argmax_reference,
    score_linear_reference,
)

__all__ = [
    "argmax_linear",
    "argmax_linear_reference",
    "score_linear",
    "score_linear_reference",
]


def _argmax_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:-1], dtype=torch.int64), x.new_empty(x.shape[:-1])


def _score_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_dtype(x.dtype)
    values = [x.new_empty(x.shape[:-1], dtype=wide) for _ in range(2)]
    return x.new_empty(x.shape[:-1], dtype=torch.int64), values[0], values[1]


argmax_linear = define_op(
    argmax_linear_reference,
    _argmax_fake,
    has_kernel=False,
    triton="argmax_linear",
    optional=("bias_V",),
)
define_op(
    row_argmax_reference,
    lambda x: x.new_empty(x.shape[:-1], dtype=torch.int64),
    has_kernel=True,
    triton="argmax_linear",
)
score_linear = define_op(
    score_linear_reference,
    _score_fake,
    has_kernel=False,
    triton="argmax_linear",
)
