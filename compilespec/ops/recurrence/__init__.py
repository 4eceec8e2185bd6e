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


def recurrence(
    query_BTNK: Tensor,
    key_BTNK: Tensor,
    value_BTHV: Tensor,
    decay: Tensor,
    beta_BTH: Tensor | None,
    kind: str,
) -> Tensor:
    """Run each sequence from a state of zeros; see `recurrence_reference`."""
    return _RECURRENCE(query_BTNK, key_BTNK, value_BTHV, decay, beta_BTH, kind)


def cached_recurrence(
    query_BSNK: Tensor,
    key_BSNK: Tensor,
    value_BSHV: Tensor,
    decay: Tensor,
    beta_BSH: Tensor | None,
    state_RHKV: Tensor,
    recent_RPE: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
    absorbed_BS: Tensor,
    commits_BS: Tensor,
    kind: str,
) -> Tensor:
    """Go on from the requests' states, in place; see `cached_recurrence_reference`."""
    return _CACHED_RECURRENCE(
        query_BSNK, key_BSNK, value_BSHV, decay, beta_BSH, state_RHKV, recent_RPE, row_BS,
        position_BS, absorbed_BS, commits_BS, kind,
    )  # fmt: skip


def _fake(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, *_: object
) -> Tensor:
    return value.new_empty(value.shape)


_RECURRENCE = define_op(
    "recurrence(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, str kind) "
    "-> Tensor",
    recurrence_reference,
    _fake,
    has_kernel=False,
)

_CACHED_RECURRENCE = define_op(
    "cached_recurrence(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, "
    "Tensor(a!) state, Tensor(b!) recent, Tensor row, Tensor position, Tensor absorbed, "
    "Tensor commits, str kind) -> Tensor",
    cached_recurrence_reference,
    _fake,
    has_kernel=True,
    triton="recurrence",
)
