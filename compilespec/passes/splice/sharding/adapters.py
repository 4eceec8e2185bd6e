"""What adapters change, of a rank's part of a product: their matrices are whole on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import fx

from compilespec.passes.splice.add_adapters import adapted, changed_by, narrowed
from compilespec.passes.splice.sharding.choices import origin
from compilespec.passes.splice.sharding.flow import Flow, Placed, Refused

OPS = torch.ops.compilespec


def adapted_product(flow: Flow, node: fx.Node) -> Placed:
    """By columns each rank takes its columns of B^T; by rows, its columns of A, and what they give
    is summed before B.
    """
    product, x = node.args[:2]
    assert isinstance(product, fx.Node)
    assert isinstance(x, fx.Node)
    made, given = flow.of(product, node), flow.of(x, node)
    if made is None and given is None:
        return None
    if made is not None and given is None:
        if made.cut.dim != len(flow.shape(product)) - 1 or made.cut.segments:
            raise Refused("an adapter of a product cut in several stretches", product)
        flow.edits[node] = functools.partial(_take_columns, flow, node, made.cut.parts)
        return made
    is_last = given is not None and given.cut.dim == len(flow.shape(x)) - 1
    if made is not None or given is None or not is_last or given.cut.segments:
        raise Refused("an adapter of values that are cut in another way", product, x)
    flow.edits[node] = functools.partial(_sum_low, flow, node, given.cut.parts)
    return None


def _take_columns(flow: Flow, node: fx.Node, parts: int) -> None:
    up = node.args[4]
    assert isinstance(up, fx.Node)
    with flow.gm.graph.inserting_before(node):
        own = flow.gm.graph.call_function(
            OPS.take_shard.default, (up, 1, parts, flow.sharding.size)
        )
    own.meta = origin(node)
    node.replace_input_with(up, own)


def _sum_low(flow: Flow, node: fx.Node, parts: int) -> None:
    product, x, keeps, down, up = node.args
    graph, size = flow.gm.graph, flow.sharding.size
    with graph.inserting_before(node):
        own = graph.call_function(OPS.take_shard.default, (down, 1, parts, size))
        low = graph.call_function(narrowed, (x, own))
        total = graph.call_function(OPS.all_reduce.default, (low, size))
    for new in (own, low, total):
        new.meta = origin(node)
    node.target, node.args = changed_by, (product, total, keeps, up)


RULES: Mapping[str, Callable[[Flow, fx.Node], Placed]] = {adapted.__name__: adapted_product}
