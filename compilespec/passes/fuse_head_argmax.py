"""Fuses a head with its argmax if only the best token is needed, so that no logits are made."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import benchmark

from compilespec.ops.argmax_linear import argmax_linear
from compilespec.passes.context import PassContext
from compilespec.passes.linears import Linear, copy_origin, find_linears

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_DIMS = (_aten.unsqueeze.default, _aten.squeeze.dim)


def fuse_head_argmax(gm: fx.GraphModule, ctx: PassContext) -> int:
    """argmax(mm(x, t(w))) -> compilespec::argmax_linear(x, w), if nothing but a gather of the best
    logit reads the logits as well.

    Applies on CUDA if the fused head is measured to be faster, or as `ctx.fuse_head` says.  Steps
    that sample read their logits; with `ctx.greedy_only` the heads of target and drafter are both
    fused.  Returns: heads rewritten.  Numerics: rounding (the products' sums may be ordered
    differently).  Runs on ATen.
    """
    is_measured = ctx.fuse_head is None and ctx.config.device.type == "cuda"
    if not (is_measured or ctx.fuse_head):
        return 0
    heads = [head for linear in find_linears(gm, ctx) if (head := _find_head(linear)) is not None]
    if is_measured:  # each weight once: a drafter's head is in the graph K times
        linears = {head.linear.weight: head.linear for head in heads}
        gaining = {weight for weight, linear in linears.items() if _gains(linear, ctx)}
        heads = [head for head in heads if head.linear.weight in gaining]
    for head in heads:
        _fuse(gm, head)
    for node in list(gm.graph.find_nodes(op="call_function", target=_aten.t.default)):
        if not node.users:
            gm.graph.erase_node(node)
    return len(heads)


@dataclass(frozen=True, kw_only=True)
class _Head:
    linear: Linear
    moves: tuple[fx.Node, ...]  # operations on the rows of logits
    argmax: fx.Node
    gathers: tuple[fx.Node, ...]  # of the best logit


def _gains(linear: Linear, ctx: PassContext) -> bool:
    """Whether the fused head is faster, over one request and over the largest batch."""
    weight, bias = (
        None if node is None else ctx.weights[ctx.inputs[node.meta["role"]].sources[0]]
        for node in (linear.weight, linear.bias)
    )
    assert weight is not None
    tokens = ctx.config.num_verify_tokens
    return is_faster(weight, bias, rows=(tokens, tokens * ctx.config.max_batch_size))


def is_faster(weight_VD: Tensor, bias_V: Tensor | None, *, rows: Sequence[int]) -> bool:
    """Whether argmax_linear takes less time than the product and its argmax, by the median over
    0.05 s at each number of rows, the ratios multiplied.
    """
    ratio = 1.0
    for count in rows:
        names = {
            "x": weight_VD.new_ones((count, weight_VD.shape[1])), "w": weight_VD, "b": bias_V,
            "fused": argmax_linear, "linear": torch.nn.functional.linear,
        }  # fmt: skip
        fused, apart = (
            benchmark.Timer(statement, globals=names).blocked_autorange(min_run_time=0.05).median
            for statement in ("fused(x, w, b)", "linear(x, w, b).argmax(-1)")
        )
        ratio *= fused / apart
    return ratio < 1.0


def _find_head(linear: Linear) -> _Head | None:
    """The product with its readers; None if they need more than its best token."""
    logits, moves = linear.node, []
    while not any(user.target is _aten.argmax.default for user in logits.users):
        if len(logits.users) != 1:
            return None
        (logits,) = logits.users
        if not _keeps_rows(logits, linear.num_outputs):
            return None
        moves.append(logits)
    argmax = next(user for user in logits.users if user.target is _aten.argmax.default)
    gathers = tuple(user for user in logits.users if user is not argmax)
    if not _is_over_last(argmax) or not all(_gathers(node, argmax) for node in gathers):
        return None
    return _Head(linear=linear, moves=tuple(moves), argmax=argmax, gathers=gathers)


def _keeps_rows(node: fx.Node, num_outputs: int) -> bool:
    """Whether `node` keeps each row of logits a row, in the same order."""
    value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    if node.target is _aten._to_copy.default:
        widens = torch.promote_types(source.dtype, value.dtype) == value.dtype
        return widens and value.is_floating_point() and set(node.kwargs) == {"dtype"}
    if node.target in _DIMS:
        return 0 <= int(str(node.args[1])) < max(source.dim(), value.dim()) - 1
    return node.target in _VIEWS and value.dim() > 0 and value.shape[-1] == num_outputs


def _is_over_last(argmax: fx.Node) -> bool:
    source: Any = argmax.args[0]
    arguments = dict(zip(("dim", "keepdim"), argmax.args[1:], strict=False)) | argmax.kwargs
    return _is_last(arguments.get("dim"), source) and not arguments.get("keepdim", False)


def _gathers(node: fx.Node, argmax: fx.Node) -> bool:
    """Whether `node` gathers what `argmax` found: gather(logits, -1, unsqueeze(argmax, -1))."""
    if node.target is not _aten.gather.default or node.kwargs or not _is_last(*node.args[1::-1]):
        return False
    index: Any = node.args[2]
    return (
        index.target is _aten.unsqueeze.default
        and index.args[0] is argmax
        and _is_last(index.args[1], index)
    )


def _is_last(dim: Any, tensor: Any) -> bool:
    return dim in (-1, tensor.meta["val"].dim() - 1)


def _fuse(gm: fx.GraphModule, head: _Head) -> None:
    linear = head.linear
    logits = linear.node.meta["val"]
    values = (logits.new_empty(logits.shape[:-1], dtype=torch.int64), logits[..., 0])
    with gm.graph.inserting_before(head.argmax):
        both = gm.graph.call_function(
            torch.ops.compilespec.argmax_linear.default, (linear.x, linear.weight, linear.bias)
        )
        both.meta["val"] = values
        copy_origin(linear.node, both)
        parts = []
        for index, value in enumerate(values):
            part = gm.graph.call_function(operator.getitem, (both, index))
            part.meta["val"] = value
            copy_origin(linear.node, part)
            for node in head.moves:
                part = _moved(gm.graph, node, part)
            parts.append(part)
        best, largest = parts
        if head.gathers:
            column = gm.graph.call_function(_aten.unsqueeze.default, (largest, -1))
            column.meta["val"] = head.gathers[0].meta["val"]
            copy_origin(linear.node, column)
            for node in head.gathers:
                node.replace_all_uses_with(column)
    indices: Any = dict.fromkeys(node.args[2] for node in head.gathers)
    for node in head.gathers:
        gm.graph.erase_node(node)
    unused = [node for node in indices if not node.users]
    head.argmax.replace_all_uses_with(best)
    for node in (*unused, head.argmax, *reversed(head.moves), linear.node):
        gm.graph.erase_node(node)


def _moved(graph: fx.Graph, node: fx.Node, part: fx.Node) -> fx.Node:
    """Apply `node`, an operation on rows of logits, to one number per row."""
    arguments: tuple[Any, ...] = node.args[1:]
    is_index = not part.meta["val"].is_floating_point()
    if node.target is _aten._to_copy.default and is_index:
        return part
    if node.target in _VIEWS:
        sizes: Any = node.args[1]
        arguments = (sizes[:-1],)
    result = graph.call_function(node.target, (part, *arguments), dict(node.kwargs))  # type: ignore[arg-type]
    value = node.meta["val"]
    result.meta["val"] = value.new_empty(
        value.shape[:-1], dtype=torch.int64 if is_index else value.dtype
    )
    copy_origin(node, result)
    return result
