"""Recurrent layers: the marker that tracing emits, and the operator that a pass puts in its place.

Gated delta rules (per head and per key), Mamba-2 and Mamba are one recurrence with different gates.
On the CPU a token's bits do not depend on the batch, the number of rows or how a prompt is cut.
"""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.recurrence.reference import cached_recurrence_reference, recurrence_reference

__all__ = [
    "cached_recurrence",
    "cached_recurrence_reference",
    "recurrence",
    "recurrence_reference",
]


def _fake(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, *_: object
) -> Tensor:
    return value.new_empty(value.shape)


recurrence = define_op(
    recurrence_reference,
    _fake,
    has_kernel=False,
)

cached_recurrence = define_op(
    cached_recurrence_reference,
    _fake,
    writes=("state_RHKV", "recent_RPE"),
    has_kernel=True,
    triton="recurrence",
)
