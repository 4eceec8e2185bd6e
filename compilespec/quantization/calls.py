"""Gives a traced call its own quantized copies of the products' weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, fx

from compilespec.errors import InvalidOption
from compilespec.ops.device import traits_of
from compilespec.ops.gguf_blocks import TYPES
from compilespec.ops.grouped_linear import BLOCK
from compilespec.program import Derived, Traced, TracedInput
from compilespec.quantization.configs import HEAD, Quantize, require_torchao
from compilespec.quantization.modules import quantize_weights
from compilespec.tracing.quantized_weights import FEW_BITS, is_quantized, take_apart
from compilespec.tracing.structure import LINEAR, head_of


def copy_products(
    traced: Traced, kind: str, *, keep_head: bool = False
) -> tuple[Traced, str, dict[str, Derived]]:
    """The call, each product of which multiplies by another form of its weight; what else reads
    the weight, such as an embedding, reads it as it is.

    Args:
        kind: "int4", quantized copies, of a head as suits heads; "upper", the upper halves of
            weights in two planes, which stay where they are.
        keep_head: leave the head as it is.
    Returns: the call, a line for `Engine.plan()`, and how its copies are made, by name.
    Raises: MissingDependency (torchao), InvalidOption (no product that suits).
    """
    require_torchao(f"SelfDraft(weights={kind!r})")
    nodes = traced.graph_module.graph.find_nodes(op="placeholder")
    read = {
        entry.name: products
        for node, entry in zip(nodes, traced.inputs, strict=True)
        if entry.kind == "weight" and (products := _products(node))
    }
    if kind == "upper":
        halves = _upper_planes({name: traced.weights[name] for name in read})
        text = f"drafter: the upper halves of {len(halves)} of {len(read)} products"
        return _with_copies(traced, halves), text, {}
    head = head_of(traced.graph_module.graph)
    is_head = {n: head is not None and head.node in products for n, products in read.items()}
    paths = {
        name: HEAD if is_head[name] else name
        for name in read
        if _suits(traced.weights[name]) and not (keep_head and is_head[name])
    }
    _check_copies(kind, paths, (traced.weights[name] for name in read))
    copies = _quantized({path: traced.weights[name] for name, path in paths.items()}, kind)
    named = {name: copies[path] for name, path in paths.items()}
    made = {
        _name_of_copy(traced, name): Derived(source=name, make=_maker(path, kind))
        for name, path in paths.items()
    }
    return _with_copies(traced, named), _describe(named, len(read)), made


def _maker(path: str, kind: str) -> Callable[[Tensor], Tensor]:
    return lambda weight: _quantized({path: weight}, kind)[path]


def _name_of_copy(traced: Traced, name: str) -> str:
    return f"{traced.name}.{name.partition('.')[2]}"


def _upper_planes(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Raises: InvalidOption where there are none."""
    halves = {n: w.upper_plane() for n, w in weights.items() if hasattr(w, "upper_plane")}
    if not halves:
        raise InvalidOption(
            "SelfDraft(weights='upper') reads the upper halves of weights in two planes, and the "
            "target has none: give quantize='int8_nested', or weights='int4'"
        )
    return halves


def _check_copies(kind: str, paths: Collection[str], weights: Iterable[Tensor]) -> None:
    """Raises: InvalidOption where copies cannot be made, or would read no less."""
    if any(map(_is_narrow, weights)):
        raise InvalidOption(
            f"SelfDraft(weights={kind!r}): the target's own weights have 4 bits, so a copy would "
            "read as much; give weights=None and layers=, or take spec='suffix'"
        )
    if not paths:
        raise InvalidOption(
            f"SelfDraft(weights={kind!r}) finds no product that it can copy: expected weights of "
            f"more than 4 bits, with input features in multiples of {BLOCK}; give weights=None and "
            "layers=, or take spec='suffix'"
        )


def _products(weight: fx.Node) -> list[fx.Node]:
    """The products that multiply by the weight."""
    return [user for user in weight.users if user.target in LINEAR and user.args[1:2] == (weight,)]


def _suits(weight: Tensor) -> bool:
    """True for matrices in groups that a product can read."""
    return weight.is_floating_point() and weight.dim() == 2 and weight.shape[1] % BLOCK == 0


def _is_narrow(weight: Any) -> bool:
    """True for quantized weights of 4 bits or fewer."""
    stored = TYPES.get(getattr(weight, "kind", ""))  # of a GGUF file
    few = stored is not None and stored.bits <= 4
    return few or str(getattr(weight, "target_dtype", "")) in FEW_BITS


def _quantized(weights: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Quantized copies of weights, by the paths of their modules."""
    device = next(iter(weights.values())).device
    name = f"{kind}_dynamic" if traits_of(device).packs_weights else f"{kind}_weight_only"
    plain = {
        path: weight.dequantize() if is_quantized(weight) else weight.detach()
        for path, weight in weights.items()
    }
    return quantize_weights(plain, Quantize(name), "SelfDraft(weights=)")


def _with_copies(traced: Traced, copies: Mapping[str, Tensor]) -> Traced:
    """The call with an input of each copy, which its products read."""
    gm, weights = traced.graph_module, dict(traced.weights)
    inputs: list[TracedInput] = []
    nodes = gm.graph.find_nodes(op="placeholder")
    for node, entry in zip(nodes, traced.inputs, strict=True):
        products = _products(node) if entry.name in copies else []
        if len(products) < len(node.users) or not products:
            inputs.append(entry)
        if not products:
            continue
        name = _name_of_copy(traced, entry.name)
        weights[name] = copies[entry.name]
        inputs.append(TracedInput(name=name, kind="weight"))
        with gm.graph.inserting_after(node):
            new = gm.graph.placeholder(f"{node.name}_copy")
        new.meta = {**node.meta, "role": name}
        for product in products:
            product.replace_input_with(node, new)
        if not node.users:
            gm.graph.erase_node(node)
            del weights[entry.name]
    gm.recompile()
    return dataclasses.replace(traced, inputs=tuple(inputs), weights=weights)


def _describe(copies: Mapping[str, Tensor], num_products: int) -> str:
    parts = [part for copy in copies.values() for part in take_apart(copy)[1].values()]
    size = sum(part.nbytes for part in parts) / 2**20
    return f"drafter: its own copies of {len(copies)} of {num_products} products, {size:.1f} MiB"
