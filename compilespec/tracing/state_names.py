"""The names of a model's state dict, and what each of them takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compilespec import _torch_compat
from compilespec.tracing.gguf_tensors import GgufTensor
from compilespec.tracing.quantized_weights import is_quantized, plain_tensors


@dataclass(frozen=True, kw_only=True)
class StateName:
    """A tensor of a model's state dict as the model was given, before it was quantized."""

    same_as: str  # the first name of the same memory: names of tied weights share it
    shape: tuple[int, ...]
    dtype: torch.dtype
    why_fixed: str = ""  # the reason why it cannot be changed; "" if it can
    of_target: str = ""  # of a drafter: the target's name, where it is the target's own


def state_names(model: nn.Module) -> dict[str, StateName]:
    """The names of `model.state_dict()`, in order."""
    first: dict[tuple[int, ...], str] = {}
    found = {}
    for name, tensor in state_tensors(model):
        found[name] = StateName(
            same_as=first.setdefault(place_of(tensor), name) if tensor.numel() else name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            why_fixed=_why_fixed(tensor),
        )
    return found


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name, those of tied modules by each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        buffers = ((n, b) for n, b in module._buffers.items() if n not in passing)
        for name, tensor in (*module._parameters.items(), *buffers):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """The address of a tensor's numbers, of a quantized one that of its first part."""
    return _torch_compat.storage_place(plain_tensors(tensor)[0])


def shared_with(
    names: Mapping[str, StateName], drafter: nn.Module, target: nn.Module
) -> dict[str, StateName]:
    """The names of a drafter, some of whose tensors are the target's own."""
    own = {place_of(tensor): name for name, tensor in state_tensors(target) if tensor.numel()}
    shared = {name: own.get(place_of(tensor), "") for name, tensor in state_tensors(drafter)}
    return {
        name: dataclasses.replace(
            one, of_target=shared[name], why_fixed="it is the target's own, and follows that"
        )
        if shared[name]
        else one
        for name, one in names.items()
    }


def with_fixed(
    names: Mapping[str, StateName], fixed: Collection[str], why: str
) -> dict[str, StateName]:
    """The names, some of which cannot be changed."""
    return {
        name: dataclasses.replace(one, why_fixed=why) if name in fixed else one
        for name, one in names.items()
    }


def _why_fixed(tensor: Tensor) -> str:
    if isinstance(tensor, GgufTensor):
        return "it is held in the blocks of a GGUF file"
    return "it is quantized in the checkpoint" if is_quantized(tensor) else ""
