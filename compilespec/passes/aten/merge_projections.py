"""Merges projections of the same activation into one product: q, k and v; gate and up."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compilespec import _torch_compat
from compilespec.passes.aten.linears import (
    Linear,
    QuantizedLinear,
    find_linears,
    find_quantized_linears,
)
from compilespec.passes.graph.nodes import add_input, copy_origin
from compilespec.passes.splice.builder import Splice
from compilespec.program import InputSpec

_aten = torch.ops.aten


def merge_projections(step: Splice) -> int:
    """mm(x, t(a)), mm(x, t(b)) -> split(mm(x, t([a; b]))).  Returns: products merged into.

    Products of quantized weights merge with others of the same kind.  Rows of the merged weight are
    the rows of its parts, so every output element is the same dot product.
    Numerics: rounding (a library may order a larger product's sums differently).  Runs on ATen.
    """
    if not step.ctx.traits.merges_products:
        return 0
    groups: dict[tuple[fx.Node, bool, torch.dtype], list[Linear]] = {}
    for linear in find_linears(step.gm, step.ctx):
        key = (linear.x, linear.bias is not None, linear.weight.meta["val"].dtype)
        groups.setdefault(key, []).append(linear)
    merged = 0
    for parts in groups.values():
        if len(parts) > 1 and len({part.weight for part in parts}) == len(parts):
            _merge(step, parts)
            merged += 1
    merged += _merge_quantized(step)
    step.graph.eliminate_dead_code(lambda node: node.op == "placeholder" or node.is_impure())
    return merged


def _merge(step: Splice, parts: list[Linear]) -> None:
    first = parts[0].node
    weight = _merged_input(step, [part.weight for part in parts])
    bias = (
        _merged_input(step, [part.bias for part in parts if part.bias]) if parts[0].bias else None
    )
    with step.graph.inserting_before(first):
        transposed = step.graph.call_function(_aten.t.default, (weight,))
        if bias is None:
            product = step.graph.call_function(_aten.mm.default, (parts[0].x, transposed))
        else:
            product = step.graph.call_function(_aten.addmm.default, (bias, parts[0].x, transposed))
    with first.meta["val"].fake_mode:
        transposed.meta["val"] = weight.meta["val"].t()
    copy_origin(first, transposed)
    _split(step.gm, product, parts)


def _merge_quantized(step: Splice) -> int:
    groups: dict[object, list[QuantizedLinear]] = {}
    for linear in find_quantized_linears(step.gm, step.ctx):
        scale = linear.scale.meta["val"]
        zero = None if linear.zero is None else linear.zero.meta["val"].dtype
        kind = (linear.node.target, linear.extra, linear.weight.meta["val"].dtype, zero)
        packed = step.ctx.inputs[linear.weight.meta["role"]].packed  # the type of GGUF blocks
        key = (linear.x, linear.bias is not None, *kind, scale.shape[1], scale.dtype, packed)
        groups.setdefault(key, []).append(linear)
    merged = 0
    for parts in groups.values():
        first = parts[0]
        if len(parts) == 1 or len({part.weight for part in parts}) < len(parts):
            continue
        weight = _merged_input(step, [part.weight for part in parts])
        scale = _merged_input(step, [part.scale for part in parts])
        biases = [part.bias for part in parts if part.bias]
        bias = _merged_input(step, biases) if biases else None
        zeros = [part.zero for part in parts if part.zero]
        zero = (_merged_input(step, zeros),) if zeros else ()
        with step.graph.inserting_before(first.node):
            op: Any = first.node.target
            x = first.node.args[0]  # an earlier merge may have replaced it
            product = step.graph.call_function(op, (x, weight, scale, bias, *first.extra, *zero))
        _split(step.gm, product, parts)
        merged += 1
    return merged


def _split(gm: fx.GraphModule, product: fx.Node, parts: Sequence[Linear | QuantizedLinear]) -> None:
    """Replace the parts by columns of the merged product."""
    first, sizes = parts[0].node, [part.num_outputs for part in parts]
    with gm.graph.inserting_before(first):
        split = gm.graph.call_function(_aten.split_with_sizes.default, (product, sizes, -1))
    with first.meta["val"].fake_mode:
        shape = (*first.meta["val"].shape[:-1], sum(sizes))
        product.meta["val"] = parts[0].x.meta["val"].new_empty(shape)
        split.meta["val"] = list(product.meta["val"].split_with_sizes(sizes, -1))
    for new in (product, split):
        copy_origin(first, new)
    with gm.graph.inserting_after(split):
        for index, part in reversed(list(enumerate(parts))):
            piece = gm.graph.call_function(operator.getitem, (split, index))
            piece.meta["val"] = split.meta["val"][index]
            copy_origin(part.node, piece)
            part.node.replace_all_uses_with(piece)
            gm.graph.erase_node(part.node)
            _copy_for_views(gm, piece)
            _lay_out_views(gm, piece)


def _copy_for_views(gm: fx.GraphModule, piece: fx.Node) -> None:
    """Copy the piece before a view that takes elements of several rows as neighbours: its rows lie
    apart now, as columns of the product.
    """
    num_columns = piece.meta["val"].shape[-1]
    pending = [piece]
    for node in pending:
        for view in [user for user in node.users if user.target in _VIEWS]:
            if _keeps_rows(view.meta["val"].shape, num_columns):
                pending.append(view)
                continue
            _copy_before(gm, node, view)


def _copy_before(gm: fx.GraphModule, node: fx.Node, view: fx.Node) -> None:
    """Let a view read a dense copy of what it views."""
    with gm.graph.inserting_before(view):
        copy = gm.graph.call_function(
            _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
    copy.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape)
    copy_origin(view, copy)
    view.replace_input_with(node, copy)


def _lay_out_views(gm: fx.GraphModule, piece: fx.Node) -> None:
    """Give the views of a piece, and theirs, its strides: what crosses a cut is compiled for the
    strides in `meta`, and would read other elements.
    """
    pending = [piece]
    with piece.meta["val"].fake_mode:
        for node in pending:
            for view in list(node.users):
                is_view = view.target in (*_VIEWS, operator.getitem) or (
                    _torch_compat.returns_alias(view.target)
                    and not _torch_compat.is_mutable(view.target)
                )
                if not is_view or view.args[0] is not node:
                    continue
                args, keywords = fx.map_arg(
                    (view.args, view.kwargs), lambda given: given.meta["val"]
                )
                target: Any = view.target
                try:
                    view.meta["val"] = target(*args, **keywords)
                except (ValueError, RuntimeError):  # its rows lie apart: such a view needs a copy
                    _copy_before(gm, node, view)
                else:
                    pending.append(view)


_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def _keeps_rows(shape: Sequence[int | torch.SymInt], num_columns: int) -> bool:
    """True where a row is the product of the last dimensions."""
    size = 1
    for dim in reversed(shape):
        if size == num_columns or not isinstance(dim, int):
            break
        size *= dim
    return size == num_columns


def _merged_input(step: Splice, parts: list[fx.Node]) -> fx.Node:
    specs = [step.ctx.inputs[part.meta["role"]] for part in parts]
    spec = InputSpec(
        name="+".join(one.name for one in specs),
        kind="weight",
        sources=tuple(source for one in specs for source in one.sources),
        packed=specs[0].packed,
    )
    node = add_input(step.gm, step.ctx, spec)
    vals = [part.meta["val"] for part in parts]
    node.meta["val"] = vals[0].new_empty((sum(val.shape[0] for val in vals), *vals[0].shape[1:]))
    return node
