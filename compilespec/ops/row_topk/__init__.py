"""The best few values of long rows, or their log-probabilities, in two passes over each row."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.row_topk.reference import row_topk_reference

__all__ = ["row_topk", "row_topk_reference"]


def _fake(x: Tensor, k: int, log_probs: bool) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


row_topk = define_op(
    row_topk_reference,
    _fake,
    has_kernel=True,
    optional=("log_probs",),
)
