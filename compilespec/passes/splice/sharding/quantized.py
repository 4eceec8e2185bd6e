"""Products with quantized weights: the stored integers are cut as weights are, scales with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from compilespec.passes.splice.sharding.flow import Flow, Placed, Refused
from compilespec.passes.splice.sharding.products import Dims, cut_alike, decide, product

_NODES = (0, 1, 2, 5)  # arguments: x, weight, scale and zero points
COLUMNS, DEPTH = 0, 1  # of stored integers; scales have groups for a depth


def quantized_linear(flow: Flow, node: fx.Node) -> Placed:
    """A linear layer over integers, scales and zero points.  They were made of the whole weight:
    each rank has a part of the same numbers.  By rows, those of groups are cut between groups.
    """
    x, weight, *scales = (arg for i, arg in enumerate(node.args) if i in _NODES and arg is not None)
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    last = len(flow.shape(x)) - 1
    dims = Dims(last, COLUMNS, DEPTH, last)
    decide(flow, weight, dims, flow.of(x, node))
    cut = flow.of(weight, node)
    for scale in scales:
        assert isinstance(scale, fx.Node)
        if cut is None and flow.of(scale, node) is not None:
            raise Refused("scales of a weight that every rank has whole", scale)
        if cut is not None and cut.cut.dim == COLUMNS:
            cut_alike(flow, node, scale, COLUMNS, weight)
        elif cut is not None:
            _cut_groups(flow, node, x, weight, scale)
    placed = product(flow, node, x, weight, node.args[3], dims)
    if node in flow.edits and node.target is torch.ops.compilespec.dynamic_int8_linear.default:
        flow.edits[node] = lambda: _add_integers(flow, node)
    return placed


def _cut_groups(flow: Flow, node: fx.Node, x: fx.Node, weight: fx.Node, scale: fx.Node) -> None:
    """Of a weight cut by rows: one scale a column is every rank's.  Raises: Refused."""
    groups, cut = flow.shape(scale)[DEPTH], flow.of(weight, node)
    assert cut is not None
    if groups == 1:
        if flow.of(scale, node) is not None:
            raise Refused("scales of a weight that is cut by rows", scale)
        return
    if cut.cut.segments or groups % cut.cut.parts:
        raise Refused(f"{groups} groups of scales cannot be cut with it", weight, x)
    cut_alike(flow, node, scale, DEPTH, weight)


def _add_integers(flow: Flow, node: fx.Node) -> None:
    """Rows are quantized by their largest number on any rank, and sums of integers are exact."""
    node.target = torch.ops.compilespec.dynamic_int8_shard.default
    node.args = (*node.args, flow.sharding.size)


RULES: Mapping[str, Callable[[Flow, fx.Node], Placed]] = {
    "compilespec::quantized_linear": quantized_linear,
    "compilespec::dynamic_int8_linear": quantized_linear,
    "compilespec::grouped_linear": quantized_linear,
}
