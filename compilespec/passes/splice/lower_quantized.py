"""Turns products of quantized weights into operators that are fast with few rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from compilespec.ops.gguf_blocks import PARTS, TYPES, embed_blocks
from compilespec.ops.grouped_linear import nested_linear
from compilespec.ops.quantized_linear import dynamic_int8_product
from compilespec.passes.aten.cleanup import drop_unused_inputs
from compilespec.passes.context import PassContext
from compilespec.passes.graph.nodes import add_input, copy_origin
from compilespec.passes.splice.builder import Splice
from compilespec.program import InputSpec
from compilespec.tracing.quantized_weights import FEW_BITS, Kind, kind_of, rebuild
from compilespec.tracing.structure import EMBEDDING, LINEAR, argument

_WEIGHT_ONLY = torch.ops.compilespec.quantized_linear.default
_DYNAMIC_INT8 = torch.ops.compilespec.dynamic_int8_linear.default
_GROUPED = torch.ops.compilespec.grouped_linear.default
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Product(NamedTuple):
    """The operator that computes a kind's product, and the names of the parts it reads."""

    op: Any
    weight: str
    scale: str
    extra: tuple[int, ...] = ()  # further arguments
    zero: str | None = None  # and this one last
    more: tuple[str, ...] = ()  # but for these


def lower_quantized(step: Splice) -> int:
    """linear(x, rebuild(parts)) -> compilespec::quantized_linear, grouped_linear or
    dynamic_int8_linear; embedding(ids, rebuild(blocks)) -> the rows that are looked up.

    Handles int8 and int4 weights, symmetric or with zero points, float8 weights, and int8 and
    grouped ones with dynamically quantized rows; other kinds keep their own code.  On GPUs int8 is
    `dynamic_int8_product`: torchao's code calls a product that refuses the few rows of a step.
    Returns: products rewritten.  Numerics: rounding (sums are float32 and rounded once, unlike
    torchao's).  Runs on torch IR, in which a weight's kind is still visible.
    """
    traits = step.ctx.traits
    if not (traits.packs_weights or traits.merges_products) or step.config.dtype not in _FLOATS:
        return 0
    lowered = _embed_blocks(step)
    for node in list(step.graph.nodes):
        if node.op != "call_function" or node.target not in LINEAR:
            continue
        x, weight, *rest = node.args
        if not isinstance(weight, fx.Node) or weight.target is not rebuild:
            continue
        product = _product_of(weight, step.ctx)
        if product is None:
            continue
        bias = rest[0] if rest else node.kwargs.get("bias")
        nodes = _parts_of(step, weight)
        last = [nodes[name] for name in (product.zero, *product.more) if name]
        arguments = (x, nodes[product.weight], nodes[product.scale], bias, *product.extra, *last)
        _replace(step, node, product.op, arguments)
        lowered += 1
    for node in list(step.graph.find_nodes(op="call_function", target=rebuild)):
        if not node.users:
            step.graph.erase_node(node)
    drop_unused_inputs(step)
    return lowered


def _replace(step: Splice, node: fx.Node, op: Any, arguments: tuple[Any, ...]) -> None:
    """Put a call in the place of a node."""
    with step.graph.inserting_before(node):
        new = step.graph.call_function(op, arguments)
    new.meta = dict(node.meta)
    copy_origin(node, new)
    node.replace_all_uses_with(new)
    step.graph.erase_node(node)


def _embed_blocks(step: Splice) -> int:
    """embedding(ids, rebuild(blocks)) -> embed_blocks(ids, blocks)."""
    lowered = 0
    for node in [one for one in step.graph.nodes if one.target in EMBEDDING]:
        ids, weight = argument(node, 0, "input"), argument(node, 1, "weight")
        if node.target is torch.embedding:
            ids, weight = node.args[1], node.args[0]
        if weight.target is not rebuild or kind_of(str(weight.args[0])).names != ("blocks",):
            continue
        metadata = kind_of(str(weight.args[0])).metadata
        _replace(step, node, embed_blocks, (ids, weight.args[1], *metadata))
        lowered += 1
    return lowered


def _parts_of(step: Splice, weight: fx.Node) -> dict[str, fx.Node]:
    """The parts of a weight by name; those of GGUF blocks are inputs that are read from them."""
    kind, parts = kind_of(str(weight.args[0])), weight.all_input_nodes
    if kind.names != ("blocks",):
        return dict(zip(kind.names, parts, strict=True))
    role, (block_type, _) = parts[0].meta["role"], kind.metadata
    return {
        part: add_input(
            step.gm,
            step.ctx,
            InputSpec(
                name=f"{role}.{part}",
                kind="weight",
                sources=(role,),
                packed=f"{block_type}.{part}",
            ),
        )
        for part in PARTS
    }


def _product_of(weight: fx.Node, ctx: PassContext) -> Product | None:
    kind = kind_of(str(weight.args[0]))
    roles = [node.meta["role"] for node in weight.all_input_nodes]
    parts = {name: ctx.weights[role] for name, role in zip(kind.names, roles, strict=True)}
    recognise = _KINDS.get(kind.type.__name__)
    if recognise is None or not kind.type.__module__.startswith(("torchao.", "compilespec.")):
        return None
    product = recognise(kind, parts)
    if product is not None and product.op is _DYNAMIC_INT8 and not ctx.traits.packs_weights:
        return product._replace(op=dynamic_int8_product)
    return product


def _int8(kind: Kind, parts: dict[str, Tensor]) -> Product | None:
    """torchao's Int8Tensor: one scale per row, or per group of a row."""
    if not set(parts) <= {"qdata", "scale", "zero_point"} or not _has_groups(kind, parts):
        return None
    dynamic = kind.metadata.get("act_quant_kwargs")
    if dynamic is None:
        return Product(_WEIGHT_ONLY, "qdata", "scale", (8,), _zero_points(parts))
    if _zero_points(parts):
        return None
    is_by_row = type(dynamic.granularity).__name__ == "PerRow" and dynamic.granularity.dim == -1
    is_plain = dynamic.mapping_type.name == "SYMMETRIC" and not getattr(
        dynamic, "reduce_range", False
    )
    if not is_by_row or not is_plain or parts["scale"].shape[1] != 1:
        return None
    return Product(_DYNAMIC_INT8, "qdata", "scale")


def _float8(kind: Kind, parts: dict[str, Tensor]) -> Product | None:
    """torchao's Float8Tensor, weight only: one scale per row."""
    if (
        set(parts) != {"qdata", "scale"}
        or kind.metadata.get("act_quant_kwargs") is not None
        or parts["qdata"].dtype != torch.float8_e4m3fn
        or parts["scale"].shape != (kind.shape[0], 1)
    ):
        return None
    return Product(_WEIGHT_ONLY, "qdata", "scale", (8,))


def _intx(kind: Kind, parts: dict[str, Tensor]) -> Product | None:
    """torchao's IntxUnpackedToInt8Tensor: any width up to 8 bits, stored as int8."""
    if (
        not set(parts) <= {"qdata", "scale", "zero_point"}
        or kind.metadata.get("activation_quantization") is not None
        or not _has_groups(kind, parts)
    ):
        return None
    bits = 4 if str(kind.metadata["target_dtype"]) in FEW_BITS else 8
    return Product(_WEIGHT_ONLY, "qdata", "scale", (bits,), _zero_points(parts))


def _grouped(kind: Kind, parts: dict[str, Tensor]) -> Product | None:
    """Our GroupedIntTensor: the same weights, whose products quantize rows in blocks."""
    product = _intx(kind, parts)
    return None if product is None else product._replace(op=_GROUPED)


def _nested(kind: Kind, parts: dict[str, Tensor]) -> Product | None:
    """Our NestedIntTensor: two planes, a product each."""
    planes = ("lower", "lower_scale")
    return Product(nested_linear, "upper", "scale", (), "zero_point", planes)


def _blocks(kind: Kind, parts: dict[str, Tensor]) -> Product:
    """Our GgufTensor: blocks of a GGUF file, of which the parts are read."""
    found = TYPES[kind.metadata[0]]
    return Product(_GROUPED, *PARTS[:2], (found.bits,), None if found.is_symmetric else PARTS[2])


_KINDS = {
    "Int8Tensor": _int8,
    "Float8Tensor": _float8,
    "IntxUnpackedToInt8Tensor": _intx,
    "GroupedIntTensor": _grouped,
    "NestedIntTensor": _nested,
    "GgufTensor": _blocks,
}


def _has_groups(kind: Kind, parts: dict[str, Tensor]) -> bool:
    """True where qdata is int8 [N, K] with scales and zero points [N, groups] of a power of two."""
    num_columns, depth = kind.shape
    scale, zero = parts["scale"], parts.get("zero_point")
    if parts["qdata"].dtype != torch.int8 or scale.dim() != 2 or scale.shape[0] != num_columns:
        return False
    if zero is not None and zero.shape != scale.shape and bool(zero.any()):
        return False
    size, rest = divmod(depth, scale.shape[1])
    return rest == 0 and (scale.shape[1] == 1 or size & (size - 1) == 0)


def _zero_points(parts: dict[str, Tensor]) -> str | None:
    """The part that has them; None where the weight is symmetric."""
    zero = parts.get("zero_point")
    return "zero_point" if zero is not None and bool(zero.any()) else None
