"""The pass `bound_positions`: what it must leave alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.hand_graphs import graph_of
from tests.support.untouched import check_left_alone


def test_indices_that_are_proved_inside_get_no_guard() -> None:
    def function(seq_len_R: Tensor, row_B: Tensor, w: Tensor) -> Tensor:
        index = torch.where(row_B >= 0, row_B, 3).long()
        return nn.functional.embedding(seq_len_R[index].clamp(max=9), w)

    state = torch.zeros(4, dtype=torch.int32)
    case = graph_of(
        function, seq_len_R=("state", state), row_B=("batch", state),
        w=("weight", torch.randn(10, 2)),
    )  # fmt: skip
    check_left_alone("bound_positions", case)
