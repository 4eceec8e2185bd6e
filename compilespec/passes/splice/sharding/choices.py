"""Tokens chosen by logits of which each rank has those of its ids."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from compilespec.passes.splice.sharding.flow import Flow, Placed, Refused
from compilespec.passes.splice.sharding.views import dim_argument, op_name

OPS = torch.ops.compilespec


def is_own_logits(flow: Flow, x: object, user: fx.Node) -> bool:
    """True where a value is a head's, cut by ids."""
    shard = flow.of(x, user)
    if shard is None or not isinstance(x, fx.Node):
        return False
    is_last = shard.cut.dim == len(flow.shape(x)) - 1
    is_cut_for_all = shard.cut.parts == flow.sharding.size and not shard.cut.segments
    return is_last and is_cut_for_all and all(map(flow.is_head, shard.origins))


def argmax_of_ranks(flow: Flow, node: fx.Node, x: fx.Node) -> None:
    """Each rank's best value and its id are gathered, instead of all logits."""
    keeps = len(flow.shape(node)) == len(flow.shape(x))
    graph, arguments = flow.gm.graph, (x, int(flow.shape(x)[-1]), flow.sharding.size)
    with graph.inserting_before(node):
        both = graph.call_function(OPS.argmax_shard.default, arguments)
        both.meta = origin(node)
        ids = graph.call_function(operator.getitem, (both, 0)) if keeps else both
        ids.meta = origin(node)
    node.op, node.kwargs, flow.best[node] = "call_function", {}, both
    node.target, node.args = (
        (torch.unsqueeze, (ids, -1)) if keeps else (operator.getitem, (both, 0))
    )


def origin(node: fx.Node) -> dict[str, Any]:
    """Metadata for a node beside one: without what that alone is."""
    return {k: v for k, v in node.meta.items() if k not in ("role", "stands_for", "example")}


def gather(flow: Flow, node: fx.Node) -> Placed:
    """`x.gather(-1, x.argmax(-1).unsqueeze(-1))` is what the argmax over ranks says beside it; of
    values cut along another dimension each rank gathers in its own.
    """
    x, dim = node.args[0], dim_argument(node, 1)
    index = node.args[2] if len(node.args) > 2 else node.kwargs.get("index")
    if not any(flow.of(one, node) for one in node.all_input_nodes):
        return None
    assert isinstance(x, fx.Node)
    assert isinstance(index, fx.Node)
    winner = index.args[0] if op_name(index) == "unsqueeze" else None
    is_best = isinstance(winner, fx.Node) and op_name(winner) == "argmax" and winner.args[0] is x
    if is_best and dim == -1 and is_own_logits(flow, x, node):
        assert isinstance(winner, fx.Node)
        flow.edits[node] = functools.partial(_take_best, flow, node, winner)
        return None
    shard = flow.of(x, node)
    if shard is None or flow.of(index, node) or not isinstance(dim, int) or shard.cut.segments:
        raise Refused("gather of values that are cut", x, index)
    at, ndim = shard.cut.dim, len(flow.shape(x))
    if dim % ndim == at or flow.shape(index)[at] != flow.shape(x)[at]:
        raise Refused("gather along the dimension that is cut", x)
    flow.edits[node] = functools.partial(_take_own_index, flow, node, index, at, shard.cut.parts)
    return shard


def _take_best(flow: Flow, node: fx.Node, winner: fx.Node) -> None:
    with flow.gm.graph.inserting_before(node):
        best = flow.gm.graph.call_function(operator.getitem, (flow.best[winner], 1))
    best.meta = origin(node)
    node.op, node.target, node.args, node.kwargs = "call_function", torch.unsqueeze, (best, -1), {}


def _take_own_index(flow: Flow, node: fx.Node, index: fx.Node, dim: int, parts: int) -> None:
    arguments = (index, dim, parts, flow.sharding.size)
    with flow.gm.graph.inserting_before(node):
        own = flow.gm.graph.call_function(OPS.take_shard.default, arguments)
    own.meta = origin(node)
    node.replace_input_with(index, own)


def _of_ranks(op: Any, *, without: int | None = None) -> Callable[[Flow, fx.Node], Placed]:
    """A rule of an operator on logits, its first argument, that has one for ranks.

    Args: without: an argument that must be None, and that the ranks' operator does not have.
    """

    def placed(flow: Flow, node: fx.Node) -> Placed:
        x, operands = node.args[0], node.all_input_nodes
        cut = [one for one in operands if flow.of(one, node)]
        has_other_ids = without is not None and node.args[without] is not None
        if cut and (cut != [x] or has_other_ids or not is_own_logits(flow, x, node)):
            raise Refused(f"{op_name(node)} needs it whole", *operands)
        if cut:
            arguments = (int(flow.shape(cut[0])[-1]), flow.sharding.size)
            flow.edits[node] = lambda: _set(node, op, without, arguments)
        return None

    return placed


def _set(node: fx.Node, op: Any, without: int | None, arguments: tuple[int, int]) -> None:
    kept = [one for place, one in enumerate(node.args) if place != without]
    node.target, node.args = op, (*kept, *arguments)


RULES: Mapping[str, Callable[[Flow, fx.Node], Placed]] = {
    "compilespec::sample": _of_ranks(OPS.sample_shard.default),
    "compilespec::draw": _of_ranks(OPS.draw_shard.default, without=2),
    "compilespec::note_logprobs": _of_ranks(OPS.note_logprobs_shard.default),
    "gather": gather,
}
