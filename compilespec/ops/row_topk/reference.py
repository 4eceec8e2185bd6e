"""The definition of `row_topk`, in plain torch."""

from __future__ import annotations

from torch import Tensor


def row_topk_reference(x: Tensor, k: int, log_probs: bool = False) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, in falling order, and where they are.

    Args:
        x: float32 or float64 [..., columns]; k: at most columns.
        log_probs: give their logarithms of probabilities in place of the values:
            x - logsumexp(x).
    Returns:
        values as x, indices int64, both [..., k].  Of equal values, those of any index; NaN is
        larger than any number, and makes all probabilities of its row NaN.
    """
    values, indices = (x.log_softmax(-1) if log_probs else x).topk(k, -1)
    return values, indices
