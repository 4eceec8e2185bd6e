"""One way to define an operator: schema, reference and fake in Python, a CPU kernel in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from compilespec.ops import _build

NAMESPACE = "compilespec"


def define_op(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    has_kernel: bool,
    tags: Sequence[torch.Tag] = (),
) -> OpOverload:
    """Define `compilespec::<schema>` and return the overload to call.

    The reference serves every device and, until the C++ kernels are loaded, the CPU too: the first
    CPU call of an operator that has a kernel loads them (`_build.load_kernels`) and goes through
    the dispatcher again.

    Args:
        schema: operator schema without namespace, such as "double(Tensor x) -> Tensor".
        reference: the definition in plain torch, same signature.
        fake: the same on fake tensors; must return the real strides.
        has_kernel: whether `kernel.cpp` in the operator's folder registers a CPU implementation.
        tags: torch tags beside `pt2_compliant_tag`.
    """
    name = schema.split("(", 1)[0]
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _LIBRARIES.append(library)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def run_reference(*args: Any) -> Any:
        if has_kernel and args[0].device.type == "cpu" and _build.kernels_untried():
            _build.load_kernels()
            return overload(*args)
        return reference(*args)

    library.impl(name, run_reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return overload


_LIBRARIES: list[torch.library.Library] = []  # registrations live as long as these
