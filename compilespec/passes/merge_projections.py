"""Projections of the same activation become one product: q, k and v; gate and up."""

from __future__ import annotations

import operator

import torch
from torch import fx

from compilespec.passes.graph import add_input
from compilespec.passes.linears import Linear, copy_origin, find_linears
from compilespec.passes.runner import PassContext
from compilespec.program import InputSpec

_aten = torch.ops.aten


def merge_projections(gm: fx.GraphModule, ctx: PassContext) -> int:
    """mm(x, t(a)), mm(x, t(b)) -> split(mm(x, t([a; b]))).  Returns: products merged into.

    Rows of the merged weight are the rows of its parts, so every output element is the same dot
    product.
    Numerics: rounding (a library may order a larger product's sums differently).  Runs on ATen.
    """
    if not ctx.prepack:
        return 0
    groups: dict[tuple[fx.Node, bool, torch.dtype], list[Linear]] = {}
    for linear in find_linears(gm, ctx):
        key = (linear.x, linear.bias is not None, linear.weight.meta["val"].dtype)
        groups.setdefault(key, []).append(linear)
    merged = 0
    for parts in groups.values():
        if len(parts) > 1 and len({part.weight for part in parts}) == len(parts):
            _merge(gm, ctx, parts)
            merged += 1
    gm.graph.eliminate_dead_code(lambda node: node.op == "placeholder" or node.is_impure())
    return merged


def _merge(gm: fx.GraphModule, ctx: PassContext, parts: list[Linear]) -> None:
    first = parts[0].node
    weight = _merged_input(gm, ctx, [part.weight for part in parts])
    bias = (
        _merged_input(gm, ctx, [part.bias for part in parts if part.bias])
        if parts[0].bias
        else None
    )
    sizes = [part.num_outputs for part in parts]
    with gm.graph.inserting_before(first):
        transposed = gm.graph.call_function(_aten.t.default, (weight,))
        if bias is None:
            product = gm.graph.call_function(_aten.mm.default, (parts[0].x, transposed))
        else:
            product = gm.graph.call_function(_aten.addmm.default, (bias, parts[0].x, transposed))
        split = gm.graph.call_function(_aten.split_with_sizes.default, (product, sizes, -1))
    mode = first.meta["val"].fake_mode
    with mode:
        transposed.meta["val"] = weight.meta["val"].t()
        product.meta["val"] = (
            parts[0].x.meta["val"].new_empty((first.meta["val"].shape[0], sum(sizes)))
        )
        split.meta["val"] = list(product.meta["val"].split_with_sizes(sizes, -1))
    for new in (transposed, product, split):
        copy_origin(first, new)
    with gm.graph.inserting_after(split):
        for index, part in reversed(list(enumerate(parts))):
            piece = gm.graph.call_function(operator.getitem, (split, index))
            piece.meta["val"] = split.meta["val"][index]
            copy_origin(part.node, piece)
            part.node.replace_all_uses_with(piece)
            gm.graph.erase_node(part.node)


def _merged_input(gm: fx.GraphModule, ctx: PassContext, parts: list[fx.Node]) -> fx.Node:
    sources = tuple(source for part in parts for source in ctx.inputs[part.meta["role"]].sources)
    node = add_input(gm, ctx, InputSpec(name="+".join(sources), kind="weight", sources=sources))
    vals = [part.meta["val"] for part in parts]
    node.meta["val"] = vals[0].new_empty((sum(val.shape[0] for val in vals), *vals[0].shape[1:]))
    return node
