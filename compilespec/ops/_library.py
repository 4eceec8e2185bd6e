"""One way to define an operator: schema, reference, fake in Python; kernels in C++ and Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

from compilespec._torch_compat import OpOverload
from compilespec.ops import _build
from compilespec.ops.device import traits_of

NAMESPACE = "compilespec"
P = ParamSpec("P")
R = TypeVar("R")


def define_op(
    reference: Callable[P, R],
    fake: Callable[..., Any],
    *,
    name: str = "",
    writes: Sequence[str] = (),
    has_kernel: bool,
    triton: str | None = None,
    tags: Sequence[torch.Tag] = (),
    optional: Sequence[str] = (),
) -> Callable[P, R]:
    """Define the operator `compilespec::<name>` by its reference; returns the overload, to call.

    The schema is the reference's signature.  The reference serves every device and, until the C++
    kernels are loaded, the CPU too: the first CPU call of an operator that has a kernel loads them
    (`_build.load_kernels`) and goes through the dispatcher again.  CUDA tensors take the Triton
    kernel if there is one; Triton is imported by the first such call.

    Args:
        reference: the definition in plain torch, every parameter annotated.
        fake: the same on fake tensors; must return the real strides.
        name: of the operator; "" is the reference's name without `_reference`.
        writes: the parameters that it writes in place.
        has_kernel: whether `kernel.cpp` in the operator's folder registers a CPU implementation.
        triton: the folder whose `kernel.py` has a function of the operator's name and signature.
        tags: torch tags beside `pt2_compliant_tag`.
        optional: parameters whose defaults are for callers alone.  The schema has none of them: a
            retrace drops arguments that equal a default, and passes read arguments by place.
    """
    name = name or reference.__name__.strip("_").removesuffix("_reference")
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _LIBRARIES.append(library)
    library.define(
        _schema(name, reference, writes, optional), tags=(torch.Tag.pt2_compliant_tag, *tags)
    )
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def run_reference(*args: Any) -> Any:
        if has_kernel and traits_of(args[0].device).is_cpu and _build.kernels_untried():
            _build.load_kernels()
            return overload(*args)
        return reference(*args)  # type: ignore[call-arg]  # the dispatcher checked them

    library.impl(name, run_reference, "CompositeExplicitAutograd")
    if triton is not None:
        TRITON_KERNELS[name] = _lazy_triton(name, triton, reference)
        library.impl(name, TRITON_KERNELS[name], "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return cast(Callable[P, R], _with_defaults(overload, reference, optional))


def _with_defaults(
    overload: OpOverload, reference: Callable[..., Any], optional: Sequence[str]
) -> Callable[..., Any]:
    """The overload, or a function that gives it what a call leaves out."""
    if not optional:
        return overload
    parameters = inspect.signature(reference).parameters
    names = list(parameters)
    num_needed = 1 + max(map(names.index, optional))

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) >= num_needed:
            return overload(*args, **kwargs)
        left = names[len(args) :]
        absent = {name: parameters[name].default for name in optional if name in left}
        return overload(*args, **{**absent, **kwargs})

    return call


def _schema(
    name: str, reference: Callable[..., Any], writes: Sequence[str], optional: Sequence[str]
) -> str:
    """The operator's schema; no integer of ours is symbolic."""
    found = torch.library.infer_schema(reference, op_name=name, mutates_args=tuple(writes))
    for one in optional:
        found = re.sub(rf"\b{one}=[^,)]+", one, found)
    return found.replace("SymInt", "int")


TRITON_KERNELS: dict[str, Callable[..., Any]] = {}  # CUDA implementations, by operator
_LIBRARIES: list[torch.library.Library] = []  # registrations live as long as these


def _lazy_triton(name: str, folder: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def load() -> Callable[..., Any]:
        if not has_triton():
            return reference
        return getattr(importlib.import_module(f"compilespec.ops.{folder}.kernel"), name)

    def run(*args: Any) -> Any:
        with _on_device_of(args[0]):
            return load()(*args)

    return run


def _on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches kernels on the current device, wherever their tensors are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.cache
def has_triton() -> bool:
    """True where Triton's kernels serve on CUDA; warns if they are missing."""
    if os.environ.get("COMPILESPEC_TRITON_KERNELS") == "0":
        return False
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed: the slow references in torch serve on the GPU, and they cannot "
        "be captured in CUDA graphs; install triton>=3.6, or set COMPILESPEC_TRITON_KERNELS=0 to "
        "silence this",
        RuntimeWarning,
        stacklevel=4,
    )
    return False
