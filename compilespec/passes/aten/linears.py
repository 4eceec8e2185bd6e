"""Finds matrix products with a weight on ATen, for merging and prepacking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Linear:
    """x @ weight.T (+ bias), weight and bias graph inputs."""

    node: fx.Node
    x: fx.Node  # [rows, K]
    weight: fx.Node  # placeholder [N, K]
    bias: fx.Node | None  # placeholder [N]

    @property
    def num_outputs(self) -> int:
        return int(self.weight.meta["val"].shape[0])


def find_linears(gm: fx.GraphModule, ctx: PassContext) -> list[Linear]:
    """Every `mm(x, t(w))` and `addmm(b, x, t(w))` whose w (and b) are weights, in graph order."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        bias: fx.Node | None = None
        if node.target is _aten.mm.default:
            x, transposed = node.args
        elif node.target is _aten.addmm.default and not node.kwargs:
            bias, x, transposed = node.args
        else:
            continue
        weight = _transposed_weight(transposed, ctx)
        if weight is None or (bias is not None and not _is_weight(bias, ctx)):
            continue
        if bias is not None and bias.meta["val"].dim() != 1:
            continue
        found.append(Linear(node=node, x=x, weight=weight, bias=bias))
    return found


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """A product of a quantized weight, all its parts graph inputs."""

    node: fx.Node  # compilespec::quantized_linear, dynamic_int8_linear or grouped_linear
    x: fx.Node  # [.., K]
    weight: fx.Node  # placeholder [N, K]
    scale: fx.Node  # placeholder [N, groups]
    bias: fx.Node | None  # placeholder [N]
    extra: tuple[Any, ...] = ()  # further arguments, before zero
    zero: fx.Node | None = None  # placeholder [N, groups]

    @property
    def num_outputs(self) -> int:
        return int(self.weight.meta["val"].shape[0])

    @property
    def bits(self) -> int:
        """dtype of the stored weight."""
        return int(self.extra[0]) if self.extra else 8


def find_quantized_linears(gm: fx.GraphModule, ctx: PassContext) -> list[QuantizedLinear]:
    """Every product of a quantized weight whose parts are weights, in graph order."""
    ops = torch.ops.compilespec
    found = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in (
            ops.quantized_linear.default,
            ops.dynamic_int8_linear.default,
            ops.grouped_linear.default,
        ):
            x, weight, scale, bias, *rest = node.args
            extra, zero = tuple(rest[:1]), rest[1] if len(rest) > 1 else None
            if all(part is None or _is_weight(part, ctx) for part in (weight, scale, bias, zero)):
                linear = QuantizedLinear(
                    node=node, x=x, weight=weight, scale=scale, bias=bias, extra=extra, zero=zero
                )
                found.append(linear)
    return found


def _transposed_weight(node: object, ctx: PassContext) -> fx.Node | None:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    is_transpose = node.target is _aten.t.default or (
        node.target is _aten.permute.default and node.args[1] == [1, 0]
    )
    source = node.args[0]
    return (
        source if is_transpose and isinstance(source, fx.Node) and _is_weight(source, ctx) else None
    )


def _is_weight(node: fx.Node, ctx: PassContext) -> bool:
    return node.op == "placeholder" and ctx.inputs[node.meta["role"]].kind == "weight"


PACKABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
