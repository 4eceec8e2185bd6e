"""A product for each head, which latent attention applies to queries and results.

On the CPU (`kernel.cpp`) the bits of a row do not depend on the number of rows, the batch or the
threads, as those of `packed_linear` do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.head_linear.reference import head_linear_reference

__all__ = ["head_linear", "head_linear_reference"]


def _head_linear(x: Tensor, weight_NKO: Tensor) -> Tensor:
    """The product without a kernel: on CUDA the library's batched product, which sums in
    float32.
    """
    if x.is_cuda:
        return torch.einsum("...nk,nko->...no", x, weight_NKO).contiguous()
    return head_linear_reference(x, weight_NKO)


def _head_linear_fake(x: Tensor, weight_NKO: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_NKO.shape[2]))


head_linear = define_op(
    _head_linear,
    _head_linear_fake,
    has_kernel=True,
    tags=(torch.Tag.flexible_layout,),
)
