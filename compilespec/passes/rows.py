"""Chooses rows of a step's tensors in a form that `narrow_rows` recognises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import emit, find_role
from compilespec.tracing.structure import shape_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Which rows are read: one of each request, or some of a packed call."""

    index: fx.Node | None  # int64 [B] or, packed, [R]; None: the last row of each request
    is_packed: bool = False


def newest_rows(gm: fx.GraphModule, ctx: PassContext, *, before: fx.Node) -> Rows:
    """The last committed row of each request: n-1 of its S in decode, `last_R` in prefill."""
    if ctx.phase == "decode":
        count = find_role(gm, "num_emitted")
        return Rows(index=emit(gm, lambda n_B: (n_B - 1).long(), count, before=before))
    last = find_role(gm, "last_R")
    return Rows(index=emit(gm, lambda last_R: last_R.long(), last, before=before), is_packed=True)


def take_rows(gm: fx.GraphModule, source: fx.Node, rows: Rows, *, before: fx.Node) -> fx.Node:
    """`source`, [B, S, ..] or packed [1, T, ..], with only those rows: [B, 1, ..] or [1, R, ..]."""
    if rows.is_packed:
        node: fx.Node = emit(gm, packed_rows, source, rows.index, before=before)
    elif rows.index is None:
        node = emit(gm, lambda x: x.narrow(1, -1, 1), source, before=before)
    else:
        shape = shape_of(source)
        sizes = None if shape is None or None in shape[2:] else shape[2:]
        node = emit(gm, one_row, source, rows.index, before=before, sizes=sizes)
    node.meta["rows"] = rows
    return node


def take_newest(
    gm: fx.GraphModule, ctx: PassContext, *sources: fx.Node, before: fx.Node
) -> tuple[fx.Node, ...]:
    """`take_rows` of the last committed row of [B, S, D] or [1, T, D] tensors: each [B, 1, D]."""
    rows = newest_rows(gm, ctx, before=before)
    taken = tuple(take_rows(gm, source, rows, before=before) for source in sources)
    if not rows.is_packed:
        return taken
    return tuple(emit(gm, lambda x_1RD: x_1RD.transpose(0, 1), x, before=before) for x in taken)


def one_row(x: Any, index_B: Any, *, sizes: Sequence[int] | None) -> Any:
    """Row `index_B` of each request: [B, 1, *sizes]; None: [B, 1, D] of an x that is [B, S, D]."""
    sizes = [x.shape[2]] if sizes is None else sizes
    index = index_B.view([-1, 1] + [1] * len(sizes))
    return x.gather(1, index.expand([index_B.shape[0], 1, *sizes]))


def packed_rows(x: Any, index_R: Any) -> Any:
    return x.index_select(1, index_R)
