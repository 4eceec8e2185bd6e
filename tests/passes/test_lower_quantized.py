"""The pass `lower_quantized`: what it must leave alone."""

from __future__ import annotations

import torch

from tests.support.hand_graphs import graph_of
from tests.support.untouched import check_left_alone


def test_products_without_a_weight_are_left_alone() -> None:
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    case = graph_of(lambda x, w: (x @ x.t(), x @ (w + 1).t()), x=("batch", x), w=("weight", w))
    check_left_alone("lower_quantized", case)
