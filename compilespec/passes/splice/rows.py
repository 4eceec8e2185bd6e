"""Chooses rows of a step's tensors in a form that `narrow_rows` recognises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from compilespec.passes.splice.builder import Splice, node_of
from compilespec.tracing.structure import shape_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Which rows are read: one of each request, or some of a packed call."""

    index: fx.Node | None  # int64 [B] or, packed, [R]; None: the last row of each request
    is_packed: bool = False


def newest_rows(step: Splice) -> Rows:
    """The last committed row of each request: n-1 of its S in decode, `last_R` in prefill."""
    if step.is_decode:
        return Rows(index=node_of((step.roles.num_emitted - 1).long()))
    return Rows(index=node_of(step.roles.last_R.long()), is_packed=True)


def take_rows(step: Splice, source: Tensor, rows: Rows) -> Tensor:
    """`source`, [B, S, ..] or packed [1, T, ..], with only those rows: [B, 1, ..] or [1, R, ..]."""
    if rows.index is None:
        taken = source.narrow(1, -1, 1)
    elif rows.is_packed:
        taken = packed_rows(source, step.value(rows.index))
    else:
        shape = shape_of(node_of(source))
        sizes = None if shape is None or None in shape[2:] else shape[2:]
        taken = one_row(source, step.value(rows.index), sizes=sizes)  # type: ignore[arg-type]
    node_of(taken).meta["rows"] = rows
    return taken


def take_newest(step: Splice, *sources: Tensor) -> tuple[Tensor, ...]:
    """`take_rows` of the last committed row of [B, S, D] or [1, T, D] tensors: each [B, 1, D]."""
    rows = newest_rows(step)
    taken = tuple(take_rows(step, source, rows) for source in sources)
    return tuple(x_1RD.transpose(0, 1) for x_1RD in taken) if rows.is_packed else taken


def one_row(x: Tensor, index_B: Tensor, *, sizes: Sequence[int] | None) -> Tensor:
    """Row `index_B` of each request: [B, 1, *sizes]; None: [B, 1, D] of an x that is [B, S, D]."""
    sizes = [x.shape[2]] if sizes is None else sizes
    index = index_B.view([-1, 1] + [1] * len(sizes))
    return x.gather(1, index.expand([index_B.shape[0], 1, *sizes]))


def packed_rows(x: Tensor, index_R: Tensor) -> Tensor:
    return x.index_select(1, index_R)
