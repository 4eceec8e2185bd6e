"""LoRA adapters of the target: merged into its weights, or beside its products."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec.errors import CheckpointError, NotSupported
from compilespec.program import Traced, module_path
from compilespec.tracing.adapter_files import Adapter, describe_misfits, names_of, read_adapter
from compilespec.tracing.copies import shallow_copy
from compilespec.tracing.load import Target
from compilespec.tracing.quantized_weights import is_quantized
from compilespec.tracing.state_names import with_fixed
from compilespec.tracing.structure import LINEAR, find_head, shape_of


def merge_adapter(target: Target, directory: Any) -> Target:
    """The target with a copy of its model, into whose weights the adapter is merged: W + B A.

    Everything else is shared with the model, which does not change.  Sums are float32 (float64
    where the model is) and rounded once.

    Raises: CheckpointError, NotSupported (see `read_adapter`; an adapter of another model; weights
        that are quantized already).
    """
    adapter = read_adapter(directory)
    merged = shallow_copy(target.model)
    products = {path: module for path, module in merged.named_modules() if _is_product(module)}
    shapes = {path: _shape(module) for path, module in products.items()}
    if misfits := describe_misfits(adapter, shapes):
        raise CheckpointError(misfit_message(adapter, misfits, target.name))
    for path, part in adapter.modules.items():
        module: Any = products[path]
        if is_quantized(module.weight):
            raise NotSupported(
                f"{adapter.source}: {path} is quantized, and nothing can be merged into it; give "
                "the checkpoint that it was made of, with quantize=, or adapters={name: directory}"
            )
        weight = _merged(module.weight, part.up, part.down, is_turned=_is_turned(module))
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"{adapter.source}: {path} with B A holds numbers that are not finite in "
                f"{weight.dtype}; lower lora_alpha, or compile with another dtype"
            )
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    note = f"adapter {adapter.source} merged into {len(adapter.modules)} products"
    fixed = {f"{path}.weight" for path in adapter.modules}
    state = with_fixed(target.state, fixed, f"adapter {adapter.source} was merged into it")
    return dataclasses.replace(target, model=merged, notes=(*target.notes, note), state=state)


def misfit_message(adapter: Adapter, misfits: str, model: str) -> str:
    return (
        f"{adapter.source} {misfits}; expected an adapter of {model}: give the model that it was "
        f"trained on (it adapts {names_of(adapter.modules)})"
    )


def adaptable_products(traced: Traced) -> Mapping[str, tuple[int, int]]:
    """(out, in) of the products that requests' adapters may change, by path: those of a module's
    own weight with [B, T, in] or [B, 1, T, in], but for the head.
    """
    graph = traced.graph_module.graph
    outputs: Any = graph.output_node().args[0]
    head = find_head(outputs[0])
    found = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in LINEAR:
            continue
        path, shape, source = module_path(node), shape_of(node), shape_of(node.args[0])
        is_own = _role(node.args[1]) == f"{traced.name}.{path}.weight"
        is_head = head is not None and node is head.node
        if not is_own or is_head or shape is None or source is None:
            continue
        if source[:-1] == shape[:-1] and source[:-1] in ((None, None), (None, 1, None)):
            found[path] = (int(shape[-1] or 0), int(source[-1] or 0))
    return found


def _role(node: object) -> str:
    return str(node.meta.get("role")) if isinstance(node, fx.Node) else ""


def _merged(weight: Tensor, up: Tensor, down: Tensor, *, is_turned: bool) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    change = up.to(weight.device, wide) @ down.to(weight.device, wide)
    merged = weight.detach().to(wide) + (change.t() if is_turned else change)
    return merged.to(weight.dtype)


def _is_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_turned(module)


def _is_turned(module: nn.Module) -> bool:
    """True where the module's weight is [in, out]: transformers' Conv1D, of GPT-2."""
    return type(module).__name__ == "Conv1D"


def _shape(module: Any) -> tuple[int, int]:
    """(out, in)"""
    first, second = module.weight.shape
    return (second, first) if _is_turned(module) else (first, second)
