"""Splits argmaxes over long rows, so that more than one block of a GPU reads a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.linears import copy_origin

_aten = torch.ops.aten
SPAN = 4096  # columns of a block, about
LEAST_COLUMNS = 2 * SPAN


def split_argmax(gm: fx.GraphModule, ctx: PassContext) -> int:
    """argmax(x, -1) -> the first of the argmaxes of x's spans that are the best.

    Inductor gives a row to one block, whatever its length: the argmax of a few rows of logits would
    leave most of a GPU idle.  GPUs only.  Returns: argmaxes split.  Numerics: exact (the first of
    equal values, and of NaNs, wins).  Runs on ATen.

    The index is not gathered: what a kernel loads at an index that it has just found is lost in
    torch 2.13, if another reduction follows ("tmp17 is not defined").
    """
    if not ctx.on_gpu:
        return 0
    found = [
        node
        for node in gm.graph.find_nodes(op="call_function", target=_aten.argmax.default)
        if _is_long(node)
    ]
    for node in found:
        _split(gm, node)
    return len(found)


def _is_long(node: fx.Node) -> bool:
    source: Any = node.args[0]
    value = source.meta["val"]
    arguments = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    if arguments.get("keepdim", False) or not value.is_floating_point() or value.dim() < 2:
        return False
    columns = value.shape[-1]
    is_last = arguments.get("dim") in (-1, value.dim() - 1)
    return is_last and isinstance(columns, int) and columns >= LEAST_COLUMNS


def _split(gm: fx.GraphModule, node: fx.Node) -> None:
    x: Any = node.args[0]
    columns = x.meta["val"].shape[-1]
    count = math.ceil(columns / SPAN)
    span = math.ceil(columns / count)
    missing = count * span - columns

    def call(target: Callable[..., Any], *args: Any, **named: Any) -> fx.Node:
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(target, args, named)
        with x.meta["val"].fake_mode:
            new.meta["val"] = target(*fx.node.map_arg(args, lambda arg: arg.meta["val"]), **named)
        copy_origin(node, new)
        return new

    if missing:  # never taken: what is added comes last
        x = call(_aten.constant_pad_nd.default, x, [0, missing], -math.inf)
    spans = call(_aten.unfold.default, x, -1, span, span)  # [.., count, span]
    begin = call(_aten.arange.start_step, 0, count * span, span, device=x.meta["val"].device)
    place = call(_aten.add.Tensor, call(_aten.argmax.default, spans, -1), begin)
    own = call(_aten.amax.default, spans, [-1])
    is_best = call(
        _aten.bitwise_or.Tensor,
        call(_aten.eq.Tensor, own, call(_aten.amax.default, own, [-1], True)),
        call(_aten.ne.Tensor, own, own),  # NaN, which is the best then
    )
    last = call(_aten.full.default, [], columns - 1, dtype=torch.int64, device=x.meta["val"].device)
    first = call(_aten.amin.default, call(_aten.where.self, is_best, place, last), [-1])
    best = call(_aten.clamp.default, first, 0, columns - 1)
    node.replace_all_uses_with(best)
    gm.graph.erase_node(node)
