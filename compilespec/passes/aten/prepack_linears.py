"""Prepacks the weights of products into the layout that is fastest for few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.ops.quantized_linear import LAYOUTS
from compilespec.ops.quantized_linear.reference import NIBBLES
from compilespec.passes.aten.cleanup import drop_unused_inputs
from compilespec.passes.aten.linears import (
    PACKABLE,
    QuantizedLinear,
    find_linears,
    find_quantized_linears,
)
from compilespec.passes.graph.nodes import add_input, copy_origin
from compilespec.passes.splice.builder import Splice
from compilespec.program import InputSpec


def prepack_linears(step: Splice) -> int:
    """mm(x, t(w)) -> compilespec::packed_linear(x, packed(w)), and the same for quantized weights,
    on the CPU; on GPUs only weights of four bits, two in a byte.  Returns: products rewritten.

    The CPU operators' order of summation does not depend on the number of rows, so that a verify
    step and a plain step of the same token agree bit for bit.  Numerics: rounding, against the
    graph before the pass.  Runs on ATen.
    """
    if not step.ctx.traits.packs_weights:
        return _pack_four_bits(step) if step.ctx.traits.is_cuda else 0
    linears = [
        linear
        for linear in find_linears(step.gm, step.ctx)
        if linear.weight.meta["val"].dtype in PACKABLE
    ]
    for linear in linears:
        packed = _packed_input(step, linear.weight, "panels")
        with step.graph.inserting_before(linear.node):
            node = step.graph.call_function(
                torch.ops.compilespec.packed_linear.default,
                (linear.x, packed, linear.bias, linear.num_outputs),
            )
        node.meta["val"] = linear.node.meta["val"]
        copy_origin(linear.node, node)
        linear.node.replace_all_uses_with(node)
        step.graph.erase_node(linear.node)
    quantized = find_quantized_linears(step.gm, step.ctx)
    for product in quantized:
        _pack_quantized(step, product)
    for node in list(step.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)):
        if not node.users:
            step.graph.erase_node(node)
    drop_unused_inputs(step)
    return len(linears) + len(quantized)


def _pack_four_bits(step: Splice) -> int:
    found = [linear for linear in find_quantized_linears(step.gm, step.ctx) if _has_nibbles(linear)]
    for linear in found:
        weight = _packed_input(step, linear.weight, "nibbles")
        arguments = (linear.node.args[0], weight, linear.scale, linear.bias, linear.zero)
        _put(step.gm, linear, torch.ops.compilespec.int4_linear.default, arguments)
    drop_unused_inputs(step)
    return len(found)


def _has_nibbles(linear: QuantizedLinear) -> bool:
    """True where a weight's groups can be packed by rows."""
    depth, groups = linear.weight.meta["val"].shape[1], linear.scale.meta["val"].shape[1]
    return linear.bits == 4 and depth // groups % NIBBLES == 0


def _pack_quantized(step: Splice, linear: QuantizedLinear) -> None:
    ops, groups = torch.ops.compilespec, "scale"
    if linear.node.target is ops.grouped_linear.default:
        op, groups = ops.packed_grouped_linear.default, "groups"
        layout = "quad_nibbles" if linear.bits == 4 else "quad_bytes"
    elif linear.node.target is ops.dynamic_int8_linear.default:
        op, layout = ops.packed_dynamic_int8_linear.default, "quads"
    else:
        op, layout = ops.packed_quantized_linear.default, "int4" if linear.bits == 4 else "bytes"
    weight = _packed_input(step, linear.weight, layout)
    scale = _packed_input(step, linear.scale, groups)
    zero = () if linear.zero is None else (_packed_input(step, linear.zero, groups),)
    x = linear.node.args[0]
    _put(step.gm, linear, op, (x, weight, scale, linear.bias, linear.num_outputs, *zero))


def _put(gm: fx.GraphModule, linear: QuantizedLinear, op: Any, arguments: tuple[Any, ...]) -> None:
    """Put a call in the product's place."""
    with gm.graph.inserting_before(linear.node):
        node = gm.graph.call_function(op, arguments)
    node.meta["val"] = linear.node.meta["val"]
    copy_origin(linear.node, node)
    linear.node.replace_all_uses_with(node)
    gm.graph.erase_node(linear.node)


def _packed_input(step: Splice, plain: fx.Node, layout: str) -> fx.Node:
    known = step.ctx.inputs[plain.meta["role"]]
    packed = f"{known.packed}/{layout}" if known.packed else layout
    spec = InputSpec(
        name=f"packed.{known.name}", kind="weight", sources=known.sources, packed=packed
    )
    node = add_input(step.gm, step.ctx, spec)
    with plain.meta["val"].fake_mode:
        node.meta["val"] = LAYOUTS[layout](plain.meta["val"])
    return node
