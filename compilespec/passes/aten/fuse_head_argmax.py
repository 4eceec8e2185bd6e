"""Fuses a head with its argmax if only the best token is needed, so that no logits are made."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compilespec.passes.aten.linears import Linear, find_linears
from compilespec.passes.graph.nodes import copy_origin
from compilespec.passes.proofs.ranges import Ranges
from compilespec.passes.proofs.sizes import Sizes
from compilespec.passes.splice.builder import Splice

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_DIMS = (_aten.unsqueeze.default, _aten.squeeze.dim)


def fuse_head_argmax(step: Splice) -> int:
    """argmax(mm(x, t(w))) -> compilespec::argmax_linear(x, w), if nothing but a gather of the best
    logit reads the logits as well.

    Applies on GPUs where sizes speak for it (`pays`), as the trait `fuses_heads` says.  Steps that
    sample read their logits; with `ctx.greedy_only` the heads of target and drafter are both
    fused.  Returns: heads rewritten.  Numerics: rounding (the products' sums may be ordered
    differently).  Runs on ATen.
    """
    if step.ctx.traits.fuses_heads is False:
        return 0
    heads = [
        head
        for linear in find_linears(step.gm, step.ctx)
        if (head := _find_head(linear)) is not None
    ]
    if step.ctx.traits.fuses_heads is None:
        ranges = Ranges(step.gm, Sizes(step.config, None), step.ctx.inputs, {})
        heads = [head for head in heads if _pays(head.linear, ranges)]
    for head in heads:
        _fuse(step.gm, head)
    for node in list(step.graph.find_nodes(op="call_function", target=_aten.t.default)):
        if not node.users:
            step.graph.erase_node(node)
    return len(heads)


@dataclass(frozen=True, kw_only=True)
class _Head:
    linear: Linear
    moves: tuple[fx.Node, ...]  # operations on the rows of logits
    argmax: fx.Node
    gathers: tuple[fx.Node, ...]  # of the best logit


MOST_ROWS = 128
LEAST_OUTPUTS = 8192


def pays(most_rows: float, num_outputs: int, dtype: torch.dtype) -> bool:
    """True where a GPU takes less time for argmax_linear than for a product and its argmax.

    It reads the weight once as the product does, and saves writing and reading the logits, and a
    launch.  But a library's product is the faster one
    - with more than `MOST_ROWS` rows, at which multiplications begin to take longer than reading
      the weight (each weight of two bytes is multiplied with all rows by one program till then);
    - with fewer than `LEAST_OUTPUTS` outputs, whose 128 programs do not fill a GPU: a library
      splits the sums as well;
    - for types of more than two bytes, which matrix units do not multiply as they are.
    """
    return most_rows <= MOST_ROWS and num_outputs >= LEAST_OUTPUTS and dtype.itemsize <= 2


def _pays(linear: Linear, ranges: Ranges) -> bool:
    most_rows = ranges.sizes.highest(ranges.size(linear.x, 0))  # at the largest batch
    return pays(float(most_rows), linear.num_outputs, linear.weight.meta["val"].dtype)


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
    """True where `node` keeps each row of logits a row, in the same order."""
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
    """True where `node` gathers what `argmax` found: gather(logits, -1, unsqueeze(argmax, -1))."""
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
