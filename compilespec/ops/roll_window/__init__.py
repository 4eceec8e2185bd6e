"""The ring of a windowed drafter: take the step's window of input pairs, keep its last K."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.roll_window.reference import roll_window_reference

__all__ = ["roll_window", "roll_window_reference"]


def roll_window(
    ring_hidden_RKD: Tensor,
    ring_ids_RK: Tensor,
    index_B: Tensor,
    hidden_BSD: Tensor,
    ids_BS: Tensor,
    num_emitted_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the window's pairs and update the ring; see `roll_window_reference`."""
    return _ROLL_WINDOW(ring_hidden_RKD, ring_ids_RK, index_B, hidden_BSD, ids_BS, num_emitted_B)


def _fake(
    ring_hidden: Tensor, ring_ids: Tensor, index: Tensor, hidden: Tensor, ids: Tensor, num: Tensor
) -> tuple[Tensor, Tensor]:
    size = (index.shape[0], ring_ids.shape[1] + 1)
    return ring_hidden.new_empty((*size, ring_hidden.shape[2])), ring_ids.new_empty(size)


_ROLL_WINDOW = define_op(
    "roll_window(Tensor(a!) ring_hidden, Tensor(b!) ring_ids, Tensor index, Tensor hidden, "
    "Tensor ids, Tensor num_emitted) -> (Tensor, Tensor)",
    roll_window_reference,
    _fake,
    has_kernel=False,
    triton="roll_window",
)
