"""Takes quantized weights, which are tensor subclasses, apart for the stages after trace.

A model is traced with plain stand-ins for its quantized weights.  When a traced graph is spliced,
each such weight becomes its plain parts, one input each, and a call of `rebuild` that puts them
together again.  The retrace to ATen runs the subclass's own code on the parts; later stages see no
subclasses.  torchao is not imported: PyTorch's own protocol gives the parts of a weight.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compilespec import _torch_compat

FEW_BITS = ("torch.int1", "torch.int2", "torch.int3", "torch.int4")  # stored in -8..7


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """Everything about a quantized weight except its tensors."""

    type: Any
    names: tuple[str, ...]  # of its parts
    metadata: Any  # the other arguments of `__tensor_unflatten__`
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def key(self) -> str:
        """A name that is the same in every process, for the key of compiled artifacts."""
        text = f"{self.names} {self.metadata} {self.shape} {self.stride}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{self.type.__module__}.{self.type.__qualname__}:{digest}"


_KINDS: dict[str, Kind] = {}  # by key: a graph's code can refer to objects only by name


def is_quantized(tensor: object) -> bool:
    """True where a tensor is a subclass made of plain parts, such as torchao's."""
    return isinstance(tensor, Tensor) and hasattr(type(tensor), "__tensor_flatten__")


def plain_tensors(tensor: Any) -> list[Tensor]:
    """The tensor itself, or the plain tensors inside a quantized one."""
    if not is_quantized(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def quantizes_rows(weight: object) -> bool:
    """True where products with this weight also quantize their input (dynamic quantization)."""
    return (
        getattr(weight, "act_quant_kwargs", None) is not None
        or getattr(weight, "quantizes_rows", False)
        or type(weight).__name__ == "LinearActivationQuantizedTensor"
    )


def take_apart(tensor: Any) -> tuple[str, dict[str, Tensor]]:
    """The key of a weight's kind, for `rebuild`, and its parts by name, in order."""
    names, metadata = tensor.__tensor_flatten__()
    kind = Kind(
        type=type(tensor), names=tuple(names), metadata=metadata,
        shape=tuple(tensor.shape), stride=tuple(tensor.stride()),
    )  # fmt: skip
    _KINDS[kind.key] = kind
    return kind.key, {name: getattr(tensor, name).detach() for name in names}


def kind_of(key: str) -> Kind:
    """The kind that `take_apart` stored under `key`."""
    return _KINDS[key]


def rebuild(key: str, *parts: Tensor) -> Tensor:
    """The weight that `take_apart` took apart; a node of spliced graphs."""
    kind = _KINDS[key]
    named = dict(zip(kind.names, parts, strict=True))
    tensor: Tensor = kind.type.__tensor_unflatten__(
        named, kind.metadata, torch.Size(kind.shape), kind.stride
    )
    return tensor


@contextlib.contextmanager
def stand_ins(module: nn.Module) -> Iterator[Mapping[tuple[int, ...], Tensor]]:
    """Replace quantized weights by plain tensors without memory while a module is traced.

    Yields: each quantized weight by the `storage_place` of its stand-in; a weight has one stand-in
    for all its uses.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}  # by the weight's id: itself and its stand-in
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for one in module.modules():
        stores: tuple[dict[str, Any], ...] = (one._parameters, one._buffers)
        for store in stores:
            for name, tensor in list(store.items()):
                if is_quantized(tensor):
                    if id(tensor) not in found:
                        found[id(tensor)] = (tensor, _stand_in(tensor))
                    places.append((store, name, tensor))
    for store, name, tensor in places:
        store[name] = found[id(tensor)][1]
    try:
        yield {
            _torch_compat.storage_place(plain): tensor.detach() for tensor, plain in found.values()
        }
    finally:
        for store, name, tensor in places:
            store[name] = tensor


def _stand_in(tensor: Tensor) -> Tensor:
    plain = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return nn.Parameter(plain, requires_grad=False)
