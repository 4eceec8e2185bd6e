"""The best of long rows, by operators that read them faster than Inductor's loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compilespec.passes.graph.nodes import copy_origin
from compilespec.passes.splice.builder import Splice

_aten = torch.ops.aten
LEAST_COLUMNS_ON_GPU = 8192  # of a row that is long there
LEAST_COLUMNS_ON_CPU = 1024


def read_long_rows(step: Splice) -> int:
    """For long rows: argmax(x, -1) -> compilespec::row_argmax(x), and on the CPU topk(x, k), or
    that of a log_softmax, -> compilespec::row_topk(x, k).

    Inductor gives a row to one block of a GPU, or one thread of a CPU, at any length: the
    argmax of a few rows of logits would leave most of a GPU idle, and take a CPU as long as a
    layer.  torch's topk on the CPU sorts pairs of a row's values and places, and needs
    log-probabilities of all.  Returns: operators replaced.  Numerics: exact (the first of equal
    values wins; of a row with NaN, some index on GPUs, the first NaN elsewhere), but for
    log-probabilities, which are rounded otherwise.  Runs on ATen.

    Argmaxes of spans in ATen would do as well, but torch 2.13 makes wrong code of them where other
    reductions follow in the same kernel.
    """
    if not (step.ctx.traits.is_cuda or step.ctx.traits.packs_weights):
        return 0
    least = LEAST_COLUMNS_ON_GPU if step.ctx.traits.is_cuda else LEAST_COLUMNS_ON_CPU
    argmaxes = [
        node for node in _calls(step.gm, _aten.argmax.default) if _is_long_argmax(node, least)
    ]
    for node in argmaxes:
        _replace_argmax(step.gm, node)
    if step.ctx.traits.is_cuda:
        return len(argmaxes)
    topks = [node for node in _calls(step.gm, _aten.topk.default) if _is_long_topk(node)]
    for node in topks:
        _replace_topk(step.gm, node)
    return len(argmaxes) + len(topks)


def _calls(gm: fx.GraphModule, target: Callable[..., Any]) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def _is_long_argmax(node: fx.Node, least: int) -> bool:
    source: Any = node.args[0]
    value = source.meta["val"]
    arguments = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    if arguments.get("keepdim", False) or not value.is_floating_point() or value.dim() < 2:
        return False
    return arguments.get("dim") in (-1, value.dim() - 1) and _has_columns(value, least)


def _is_long_topk(node: fx.Node) -> bool:
    source: Any = node.args[0]
    value = source.meta["val"]
    arguments = dict(zip(("k", "dim", "largest"), node.args[1:], strict=False)) | node.kwargs
    if value.dtype not in (torch.float32, torch.float64) or not arguments.get("largest", True):
        return False
    is_last = arguments.get("dim", -1) in (-1, value.dim() - 1)
    return is_last and _has_columns(value, LEAST_COLUMNS_ON_CPU)


def _has_columns(value: torch.Tensor, least: int) -> bool:
    columns = value.shape[-1] if value.dim() else 0
    return isinstance(columns, int) and columns >= least


def _replace_argmax(gm: fx.GraphModule, node: fx.Node) -> None:
    columns = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    with gm.graph.inserting_before(node):
        found = gm.graph.call_function(torch.ops.compilespec.row_argmax.default, (node.args[0],))
        best = gm.graph.call_function(_aten.clamp.default, (found, 0, columns - 1))
    for new in (found, best):
        new.meta["val"] = node.meta["val"]
        copy_origin(node, new)
    node.replace_all_uses_with(best)
    gm.graph.erase_node(node)


def _replace_topk(gm: fx.GraphModule, node: fx.Node) -> None:
    source: Any = node.args[0]
    log_probs = _is_log_softmax(source)
    rows = source.args[0] if log_probs else source
    with gm.graph.inserting_before(node):
        best = gm.graph.call_function(
            torch.ops.compilespec.row_topk.default, (rows, node.args[1], log_probs)
        )
    best.meta["val"] = node.meta["val"]
    copy_origin(node, best)
    node.replace_all_uses_with(best)
    gm.graph.erase_node(node)
    if log_probs and not source.users:
        gm.graph.erase_node(source)


def _is_log_softmax(node: fx.Node) -> bool:
    if node.target is not _aten._log_softmax.default or len(node.users) != 1:
        return False
    source: Any = node.args[0]
    value = source.meta["val"]
    return node.args[1] in (-1, value.dim() - 1) and value.dtype == node.meta["val"].dtype
