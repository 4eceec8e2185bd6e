"""Our Triton kernels, compiled by several workers before anything is captured.

A launch compiles its kernel unless one of that kind was launched before, and its caller waits.  So
each call of our operators in a step's graph is made beforehand, on tensors without memory, for all
sizes that will be captured: such a launch compiles, and runs nothing.  Steps that were loaded from
disk are left out: Triton's own cache has their kernels.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from compilespec._torch_compat import OpOverload, size_expression, tree_map
from compilespec.ops._library import NAMESPACE, TRITON_KERNELS, has_triton
from compilespec.ops.device import traits_of
from compilespec.program import Lowered, PhaseGraph, StepKey
from compilespec.progress import Reporter

logger = logging.getLogger("compilespec")

Sizes = Mapping[str, int]  # by letter: those of a bucket
_MOST_WORKERS = 16


def compile_kernels(
    lowered: Lowered, sizes: Mapping[StepKey, Sequence[Sizes]], progress: Reporter
) -> None:
    """Compile the kernels of the steps that were lowered anew, for the sizes of each."""
    device = lowered.program.config.device
    if not traits_of(device).is_cuda or not has_triton():
        return
    calls: dict[str, Callable[[], Any]] = {}
    for key, phase in lowered.graphs.items():
        if not phase.from_cache:
            calls.update(launches(lowered.program.graphs[key], sizes.get(key, ())))
    if calls:
        with progress.step("compile", "Triton kernels"), torch.cuda.device(device):
            compile_launches(calls)


def launches(graph: PhaseGraph, sizes: Sequence[Sizes]) -> dict[str, Callable[[], Any]]:
    """The calls of our operators at these sizes, by a text that equal calls share."""
    letters = {
        size_expression(fake.shape[0]): spec.name.rpartition("_")[2][0]
        for spec, fake in zip(graph.inputs, graph.fakes, strict=True)
        if spec.kind == "batch" and isinstance(fake.shape[0], torch.SymInt)
    }
    given: dict[str, tuple[str, Any]] = {}  # layers call alike
    for node in graph.graph_module.graph.nodes:
        if name := _kernel_of(node):
            values = fx.map_arg(node.args, lambda one: one.meta["val"])
            given.setdefault(_key(name, values), (name, values))
    found: dict[str, Callable[[], Any]] = {}
    for one in sizes:
        known = {symbol: one[letter] for symbol, letter in letters.items()}
        for name, values in given.values():
            with contextlib.suppress(TypeError):  # a size that no bucket decides
                args = tree_map(partial(_without_memory, known), values)
                found[_key(name, args)] = partial(TRITON_KERNELS[name], *args)
    return found


def _kernel_of(node: fx.Node) -> str:
    """The operator of ours that a node calls, if it has a Triton kernel; else ""."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != NAMESPACE:
        return ""
    name = node.target._schema.name.partition("::")[2]
    return name if name in TRITON_KERNELS else ""


def _key(name: str, values: Any) -> str:
    """A text of a call that says of tensors what Triton asks of them."""

    def look(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.dtype, value.shape, value.stride(), value.storage_offset()

    return f"{name} {tree_map(look, values)}"


def _without_memory(known: Mapping[Any, int], value: Any) -> Any:
    """A value of a call at known sizes; a tensor has its strides and no memory.

    Raises: TypeError where another size decides.
    """

    def number(one: Any) -> int:
        return int(size_expression(one).subs(known)) if isinstance(one, torch.SymInt) else one

    if isinstance(value, Tensor):
        shape, strides = (tuple(map(number, each)) for each in (value.shape, value.stride()))
        first = number(value.storage_offset())  # kernels ask whether addresses are aligned
        end = first + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = torch.empty(max(first, end), dtype=value.dtype, device="meta")
        return flat.as_strided(shape, strides, first)
    return number(value)


def compile_launches(calls: Mapping[str, Callable[[], Any]]) -> None:
    """Make calls whose launches compile and run nothing; several kernels at once.

    A call that fails is left to the first launch, which shows its error.
    """
    workers = min(_MOST_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool, _compiling_in(pool):
        for name, call in calls.items():
            try:
                call()
            except Exception as error:
                logger.debug("kernels of %s were not compiled ahead: %s", name, error)


@contextlib.contextmanager
def _compiling_in(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Within, launches of this thread, and of no other one, only compile."""
    from triton import AsyncCompileMode
    from triton.runtime import _async_compile
    from triton.runtime.jit import JITFunction

    mode = AsyncCompileMode(pool, ignore_errors=True)
    launch = JITFunction.run

    def run(self: Any, *args: Any, warmup: bool, **given: Any) -> Any:
        is_ours = _async_compile.active_mode.get() is mode
        return launch(self, *args, warmup=warmup or is_ours, **given)

    with mock.patch.object(JITFunction, "run", run), mode:
        yield
