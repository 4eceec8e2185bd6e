"""Matrix products with weights, embeddings: where cuts begin, and where they end in a sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import fx

from compilespec.passes.splice.sharding.flow import Flow, Placed, Refused, Shard


def linear(flow: Flow, node: fx.Node) -> Placed:
    """x @ weight.T + bias.  By columns: a piece of the outputs each.  By rows: each rank multiplies
    its piece of the inputs, and what they got is summed.
    """
    x, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    last = len(flow.shape(x)) - 1
    dims = Dims(last, 0, 1, last)
    decide(flow, weight, dims, flow.of(x, node))
    return product(flow, node, x, weight, bias, dims)


def matmul(flow: Flow, node: fx.Node) -> Placed:
    """x @ w or w @ x, where w is (chosen rows of) a weight; or a product of activations that have
    heads in front.
    """
    x, weight = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    is_left = x in flow.roots and weight not in flow.roots
    x, weight = (weight, x) if is_left else (x, weight)
    ndim, ndim_x, ndim_result = (len(flow.shape(one)) for one in (weight, x, node))
    if min(ndim, ndim_x) < 2:
        _want_whole(flow, node)
        return None
    outputs, inputs = (ndim - 2, ndim - 1) if is_left else (ndim - 1, ndim - 2)
    dims = Dims(ndim_x - (2 if is_left else 1), outputs, inputs, ndim_result - (ndim - outputs))
    given = flow.of(x, node)
    decide(flow, weight, dims, given)
    cut = flow.of(weight, node)
    if given is not None and given.cut.dim < min(ndim_x - 2, ndim_x - 1 - is_left):
        same = cut is not None and cut.cut.dim - ndim == given.cut.dim - ndim_x
        if same and cut is not None and cut.cut.parts == given.cut.parts:
            return given.at(given.cut.dim, cut)
        if cut is None and ndim == 2:
            return given
        raise Refused("a product of values that are cut in different ways", x, weight)
    return product(flow, node, x, weight, None, dims)


def _want_whole(flow: Flow, node: fx.Node) -> None:
    """Raises: Refused where one is cut."""
    if any(flow.of(x, node) for x in node.all_input_nodes):
        raise Refused("a product of vectors", *node.all_input_nodes)


def addmm(flow: Flow, node: fx.Node) -> Placed:
    """bias + x @ w."""
    bias, x, weight = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    dims = Dims(1, 1, 0, 1)
    decide(flow, weight, dims, flow.of(x, node))
    return product(flow, node, x, weight, bias, dims)


class Dims(NamedTuple):
    """Dimensions of a product."""

    summed: int  # of x: what is summed over
    outputs: int  # of the weight
    inputs: int  # of the weight: what is summed over
    result: int  # of the result: the weight's outputs


def decide(flow: Flow, weight: fx.Node, dims: Dims, given: Shard | None) -> None:
    """How an undecided weight is cut, given how its input is."""
    name = flow.undecided(weight)
    if name is None:
        return
    way = flow.sharding.way(name)
    if way == "whole":
        flow.keep_whole(name, "the plan says so")
    elif way == "columns" or (way is None and given is None):
        flow.propose(weight, dims.outputs)
    elif way == "rows":
        flow.propose(weight, dims.inputs)
    elif given is not None and (given.cut.dim, given.cut.parts) == (
        dims.summed,
        flow.sharding.size,
    ):
        flow.propose(weight, dims.inputs, given.cut)


def product(
    flow: Flow,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: object,
    dims: Dims,
) -> Placed:
    given, cut = flow.of(x, node), flow.of(weight, node)
    is_by_columns = cut is not None and cut.cut.dim == dims.outputs
    if not is_by_columns and isinstance(bias, fx.Node) and flow.of(bias, node) is not None:
        raise Refused("the bias of a product that every rank has whole", bias)
    if given is None and cut is None:
        return None
    if cut is not None and is_by_columns:
        if given is not None:
            raise Refused("its input is cut, too: it must be cut by rows", weight, x)
        if isinstance(bias, fx.Node):
            cut_alike(flow, node, bias, len(flow.shape(bias)) - 1, weight)
        return cut.at(dims.result)
    if given is None:
        raise Refused("its input is whole: it must be cut by columns", weight)
    if cut is None or given.cut.dim != dims.summed:
        raise Refused("a product along the dimension that is cut", x, weight)
    same = (given.cut.parts, given.cut.segments) == (cut.cut.parts, cut.cut.segments)
    if not same or given.cut.parts != flow.sharding.size or cut.cut.dim != dims.inputs:
        raise Refused("a product of pieces that do not fit", x, weight)
    flow.edits[node] = lambda: add_up(flow, node)
    return None


def cut_alike(flow: Flow, node: fx.Node, operand: fx.Node, dim: int, weight: fx.Node) -> None:
    """Cut a bias, or scales, as the weight beside it is.  Raises: Refused."""
    found, cut = flow.of(operand, node), flow.of(weight, node)
    assert cut is not None
    if found is None and not flow.propose(operand, dim, cut.cut):
        raise Refused("its bias or scales are whole", weight)
    if found is not None and (found.cut.dim, found.cut.parts, found.cut.segments) != (
        dim,
        cut.cut.parts,
        cut.cut.segments,
    ):
        raise Refused(
            "its bias or scales are cut in another way",
            operand,
            parts=cut.cut.parts,
            segments=cut.cut.segments,
        )


def add_up(flow: Flow, node: fx.Node) -> None:
    """Sum what the ranks got; a bias is added once, to the sum."""
    graph, bias = flow.gm.graph, None
    name = getattr(node.target, "__name__", "")
    if name == "addmm":
        bias, node.args = node.args[0], node.args[1:]
        node.target = torch.mm
    elif name == "quantized_linear.default":
        bias, node.args = node.args[3], (*node.args[:3], None, *node.args[4:])
    elif name == "linear":
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        node.args, node.kwargs = (*node.args[:2], None), {}
    with graph.inserting_after(node):
        total = graph.call_function(
            torch.ops.compilespec.all_reduce.default, (node, flow.sharding.size)
        )
    flow.hand_on(node, total)
    if bias is not None:
        with graph.inserting_after(total):
            whole = graph.call_function(torch.add, (total, bias))
        flow.hand_on(total, whole)


def embedding(flow: Flow, node: fx.Node) -> Placed:
    """A table of all ids is cut by rows: each rank looks up its own, and the rest adds zeros."""
    table = node.args[1]
    assert isinstance(table, fx.Node)
    name = flow.undecided(table)
    if name is not None:
        if flow.sharding.way(name) == "whole" or flow.shape(table)[0] != flow.num_ids:
            flow.keep_whole(name, "a table of other things than ids")
        else:
            flow.propose(table, 0)
    cut = flow.of(table, node)
    if cut is None:
        return None
    if cut.cut.dim != 0:
        raise Refused("a table that is not cut by rows", table)

    def edit() -> None:
        node.target = torch.ops.compilespec.embed_shard.default
        node.args, node.kwargs = (*node.args[:2], flow.sharding.size), {}
        add_up(flow, node)

    flow.edits[node] = edit
    return None


def head_linear(flow: Flow, node: fx.Node) -> Placed:
    """A product for each head: of a rank's heads."""
    x, weight = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    given, heads = flow.of(x, node), len(flow.shape(x)) - 2
    if given is None and flow.of(weight, node) is None:
        return None
    if given is not None and given.cut.dim == heads and not given.cut.segments:
        cut = flow.of(weight, node)
        if cut is None and flow.propose(weight, 0, given.cut):
            cut = flow.of(weight, node)
        if cut is not None and (cut.cut.dim, cut.cut.parts) == (0, given.cut.parts):
            return given.at(heads, cut)
    raise Refused("a product for each head, of values that are cut in different ways", x, weight)


RULES: Mapping[str, Callable[[Flow, fx.Node], Placed]] = {
    "linear": linear,
    "matmul": matmul,
    "bmm": matmul,
    "addmm": addmm,
    "compilespec::head_linear": head_linear,
    "embedding": embedding,
}
