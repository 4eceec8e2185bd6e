"""The ring of a windowed drafter: take the step's window of input pairs, keep its last K."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.roll_window.reference import roll_window_reference

__all__ = ["roll_window", "roll_window_reference"]


def _fake(
    ring_hidden: Tensor, ring_ids: Tensor, index: Tensor, hidden: Tensor, ids: Tensor, num: Tensor
) -> tuple[Tensor, Tensor]:
    size = (index.shape[0], ring_ids.shape[1] + 1)
    return ring_hidden.new_empty((*size, ring_hidden.shape[2])), ring_ids.new_empty(size)


roll_window = define_op(
    roll_window_reference,
    _fake,
    writes=("ring_hidden_RKD", "ring_ids_RK"),
    has_kernel=False,
    triton="roll_window",
)
