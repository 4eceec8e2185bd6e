"""LoRA adapters of the target: merged into its weights, or checked against its products."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import CheckpointError, NotSupported
from compilespec.tracing.adapter_files import Adapter, describe_misfits, names_of, read_adapter
from compilespec.tracing.copies import shallow_copy
from compilespec.tracing.load import Target
from compilespec.tracing.quantized_weights import is_quantized


def merge_adapter(target: Target, directory: Any) -> Target:
    """The target with a copy of its model, into whose weights the adapter is merged: W + B A.

    Everything else is shared with the model, which stays as it is.  Sums are float32 (float64 where
    the model is) and rounded once.

    Raises: CheckpointError, NotSupported (see `read_adapter`; an adapter of another model; weights
        that are quantized already).
    """
    adapter = read_adapter(directory)
    merged = shallow_copy(target.model)
    products = {path: module for path, module in merged.named_modules() if _is_product(module)}
    shapes = {path: _shape(module) for path, module in products.items()}
    if misfits := describe_misfits(adapter, shapes):
        raise CheckpointError(misfit_message(adapter, target, misfits))
    for path, part in adapter.modules.items():
        module: Any = products[path]
        if is_quantized(module.weight):
            raise NotSupported(
                f"{adapter.source}: {path} is quantized, and nothing can be merged into it; give "
                "the checkpoint that it was made of, with quantize=, or adapters={name: directory}"
            )
        weight = _merged(module.weight, part.up, part.down, is_turned=_is_turned(module))
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    note = f"adapter {adapter.source} merged into {len(adapter.modules)} products"
    return dataclasses.replace(target, model=merged, notes=(*target.notes, note))


def misfit_message(adapter: Adapter, target: Target, misfits: str) -> str:
    return (
        f"{adapter.source} {misfits}; expected an adapter of {target.name}: give the model that "
        f"it was trained on (it adapts {names_of(adapter.modules)})"
    )


def _merged(weight: Tensor, up: Tensor, down: Tensor, *, is_turned: bool) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    change = up.to(weight.device, wide) @ down.to(weight.device, wide)
    merged = weight.detach().to(wide) + (change.t() if is_turned else change)
    return merged.to(weight.dtype)


def _is_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_turned(module)


def _is_turned(module: nn.Module) -> bool:
    """Whether its weight is [in, out]: transformers' Conv1D, of GPT-2."""
    return type(module).__name__ == "Conv1D"


def _shape(module: Any) -> tuple[int, int]:
    """(out, in)"""
    first, second = module.weight.shape
    return (second, first) if _is_turned(module) else (first, second)
