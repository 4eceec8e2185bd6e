"""The definition of `argmax_linear` and `score_linear`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from compilespec.ops._tensors import wide_dtype


def argmax_linear_reference(
    x: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The largest logit of each row.

    Args:
        x: [..., D]; weight_VD, bias_V: the head, dtype of x.
    Returns:
        Its index, int64 [...], the first among equal logits, which are compared as rounded to the
        dtype of x; and the logit, dtype of x.  A row with NaN gives NaN, and some index inside the
        vocabulary.
    """
    logits = functional.linear(x, weight_VD, bias_V)
    best = logits.argmax(-1)
    return best, logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def row_argmax_reference(x: Tensor) -> Tensor:
    """The first index of each row's largest value: int64 [...]; of a row with NaN, some index."""
    return x.argmax(-1)


def score_linear_reference(
    x: Tensor, weight_VD: Tensor, bias_V: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the values that log-probabilities need.

    Args:
        ids: int32 or int64 [...], a token of each row; outside the vocabulary: none.
    Returns:
        argmax (int64), log-sum-exp of the rounded logits, and the logit at `ids` (-inf where there
        is none), both float32 (float64 for float64), all [...].
    """
    wide = wide_dtype(x.dtype)
    logits = functional.linear(x, weight_VD, bias_V)
    is_id = (ids >= 0) & (ids < weight_VD.shape[0])
    place = torch.where(is_id, ids, 0).long().unsqueeze(-1)
    picked = logits.gather(-1, place).squeeze(-1).to(wide)
    picked = torch.where(is_id, picked, float("-inf"))
    return logits.argmax(-1), logits.to(wide).logsumexp(-1), picked
