"""Argmaxes over long rows, by an operator that reads them faster than Inductor's loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.linears import copy_origin

_aten = torch.ops.aten
LEAST_COLUMNS = 8192


def split_argmax(gm: fx.GraphModule, ctx: PassContext) -> int:
    """argmax(x, -1) -> compilespec::row_argmax(x), for long rows.

    Inductor gives a row to one block of a GPU, or one thread of a CPU, whatever its length: the
    argmax of a few rows of logits would leave most of a GPU idle, and take a CPU as long as a
    layer.  Returns: argmaxes split.  Numerics: exact (the first of equal values wins; of a row with
    NaN, some index on GPUs, the first NaN elsewhere).  Runs on ATen.

    Argmaxes of spans in ATen would do as well, but torch 2.13 makes wrong code of them where other
    reductions follow in the same kernel.
    """
    if not (ctx.on_gpu or ctx.prepack):
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
    columns = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    with gm.graph.inserting_before(node):
        found = gm.graph.call_function(torch.ops.compilespec.row_argmax.default, (node.args[0],))
        best = gm.graph.call_function(_aten.clamp.default, (found, 0, columns - 1))
    for new in (found, best):
        new.meta["val"] = node.meta["val"]
        copy_origin(node, new)
    node.replace_all_uses_with(best)
    gm.graph.erase_node(node)
