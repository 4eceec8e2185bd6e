"""Runs a compiled step on meta tensors: what it would launch, read, write and copy, in order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compilespec import _torch_compat
from compilespec.ops._library import TRITON_KERNELS
from compilespec.program import InputSpec
from tools.without_gpu.absent import absent_gpu, allocating, launching, programs_of
from tools.without_gpu.gpus import Gpu
from tools.without_gpu.machine_code import CompiledStep, Kernel, compiling_launches

Kind = Literal["generated", "own", "library"]
_ALLOCATES = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like")
_TELLS_THE_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One launch: a kernel that Inductor generated, one of ours, or a library's."""

    kind: Kind
    name: str
    inputs: tuple[InputSpec, ...]
    """The step's inputs among its tensors, or views of them."""
    num_bytes: int
    """Read and written.  Of caches none: how much is read of them depends on lengths."""
    matrices: Mapping[InputSpec, int] = field(default_factory=dict)
    """Its weights of two dimensions and more, and their bytes."""
    grid: tuple[int, ...] = ()
    """Programs; of a generated kernel their number, at least."""

    def reads(self, kind: str) -> bool:
        return any(entry.kind == kind for entry in self.inputs)

    @property
    def whole_matrices(self) -> dict[InputSpec, int]:
        """Those that it reads from end to end, and not a few rows of them."""
        return {entry: size for entry, size in self.matrices.items() if size <= self.num_bytes}


@dataclass(kw_only=True)
class DryRun:
    """What a step does, beyond its results."""

    calls: list[Call] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    """Ours, compiled as they were launched."""
    host_copies: list[str] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    """Operations whose result the host waits for."""
    references: list[str] = field(default_factory=list)
    """Operators of ours without a Triton kernel, which run operation by operation."""

    @property
    def cache_copies(self) -> list[str]:
        """Launches that take a cache but are not those of our operators."""
        return [call.name for call in self.calls if call.reads("cache") and call.kind != "own"]


def dry_run(compiled: CompiledStep, gpu: Gpu) -> DryRun:
    """Run a step at its example sizes.  Raises: the code's errors on meta tensors."""
    step = compiled.step
    tensors = [_meta_like(fake) for fake in step.fakes]
    entries = [*step.inputs, *(_CONSTANT for _ in step.constants)]
    known = {_place(t): entry for t, entry in zip(tensors, entries, strict=True) if _is_tensor(t)}
    watcher = _Watcher(known, gpu)
    with absent_gpu(gpu), allocating("meta"), launching(watcher.generated):
        with compiling_launches(watcher.own), watcher, torch.no_grad():
            compiled.call(*tensors)
    return watcher.seen


_CONSTANT = InputSpec(name="constant", kind="state")


class _Watcher(TorchDispatchMode):
    """Sees every operation and launch."""

    def __init__(self, known: Mapping[tuple[int, ...], InputSpec], gpu: Gpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self._known, self._gpu = DryRun(), known, gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, tensors = func.name(), [*filter(_is_tensor, tree_leaves((args, kwargs)))]
        if func.namespace == "compilespec":
            return self._operator(func, args)
        if any(tag in func.tags for tag in _TELLS_THE_HOST) or _has_mask(func, args):
            self.seen.syncs.append(name)
            return 1 if name.startswith("aten::_local_scalar_dense") else func(*args, **kwargs)
        devices = {tensor.device.type for tensor in tensors}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if len(devices) > 1:
            self.seen.host_copies.append(name)
            if name == "aten::copy_":
                return args[0]
        result = func(*args, **kwargs)
        outputs = [*filter(_is_tensor, tree_leaves(result))]
        if _launches(func) and any(t.numel() and t.device.type == "meta" for t in outputs):
            read = [] if name.startswith("aten::new_") else tensors
            self._add("library", name, [*read, *outputs])
        return result

    def _operator(self, func: Any, args: tuple[Any, ...]) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name not in TRITON_KERNELS:
            self.seen.references.append(name)
            return func(*args)
        with self:
            return TRITON_KERNELS[name](*args)

    def generated(self, kernel: Any, *args: Any) -> None:
        """A launch of a kernel that Inductor generated."""
        num_bytes = round(1e9 * kernel.inductor_meta["kernel_num_gb"])
        grid = (programs_of(kernel, args),)
        self._add("generated", kernel.fn.__name__, args, num_bytes=num_bytes, grid=grid)

    def own(self, kernel: Kernel, args: Sequence[Any], grid: tuple[int, ...]) -> None:
        """A launch of one of our kernels, which was compiled for it."""
        if kernel not in self.seen.kernels:
            self.seen.kernels.append(kernel)
        self._add("own", kernel.name, args, grid=grid)

    def _add(
        self,
        kind: Kind,
        name: str,
        arguments: Iterable[Any],
        *,
        num_bytes: int | None = None,
        grid: tuple[int, ...] = (),
    ) -> None:
        tensors = {_place(t): t for t in filter(_is_tensor, tree_leaves(tuple(arguments)))}
        weights = [place for place in tensors if self._kind(place) == "weight"]
        matrices = {self._known[at]: tensors[at] for at in weights if _is_matrix(tensors[at])}
        inputs = tuple(self._known[place] for place in tensors if place in self._known)
        if num_bytes is None:
            counted = (place for place in tensors if self._kind(place) in ("", "weight"))
            num_bytes = sum(_num_bytes(tensors[place]) for place in counted)
        self.seen.calls.append(
            Call(
                kind=kind,
                name=name,
                inputs=inputs,
                num_bytes=num_bytes,
                matrices={entry: _num_bytes(tensor) for entry, tensor in matrices.items()},
                grid=grid,
            )
        )

    def _kind(self, place: tuple[int, ...]) -> str:
        return self._known[place].kind if place in self._known else ""


def _launches(func: Any) -> bool:
    is_view = _torch_compat.returns_alias(func) and not _torch_compat.is_mutable(func)
    return not is_view and func.name().split("::")[1].split(".")[0] not in _ALLOCATES


def _meta_like(fake: Any) -> Any:
    """A tensor without data of a fake's example size."""
    if not isinstance(fake, Tensor):
        return _torch_compat.example_of(fake)
    shape, stride = (
        [_torch_compat.example_of(size) for size in sizes] for sizes in (fake.shape, fake.stride())
    )
    return torch.empty_strided(shape, stride, dtype=fake.dtype, device="meta")


def _has_mask(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation indexes by a mask, whose number of trues the host must know."""
    if not func.name().startswith(("aten::index.Tensor", "aten::index_put", "aten::_index_put")):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _place(tensor: Tensor) -> tuple[int, ...]:
    """The storage of a tensor without data."""
    return (tensor.untyped_storage()._cdata,)


def _is_matrix(tensor: Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) > 1


def _num_bytes(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
