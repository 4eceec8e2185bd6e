"""Steps as Inductor's CUDA code, every Triton kernel of it as machine code."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from triton import knobs
from triton.runtime.jit import JITFunction

from compilespec import _torch_compat
from compilespec.lowering import inductor_options
from tools.without_gpu.absent import absent_gpu, allocating
from tools.without_gpu.gpus import Gpu
from tools.without_gpu.steps import CUDA, CudaStep

OPTIONS: dict[str, Any] = {
    **inductor_options(CUDA, "decode"),
    "compile_threads": 1,  # workers of other processes would not know the GPU
    "force_disable_caches": True,  # no GPU that is there may find code made without it
    "benchmark_combo_kernel": True,  # every kernel notes the bytes that it reads and writes
}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One configuration of a Triton kernel, compiled."""

    name: str
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread: registers for which there is no room go there, and local arrays."""
    shared: int
    """Bytes of a program."""


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step's code: callable on meta tensors inside `absent_gpu`."""

    call: Callable[..., Any] = field(repr=False)
    step: CudaStep = field(repr=False)
    kernels: tuple[Kernel, ...]
    seconds: float


def compile_step(step: CudaStep, gpu: Gpu) -> CompiledStep:
    """Lower a step for `gpu`, and compile every kernel with every configuration it may choose."""
    kernels: list[Kernel] = []
    started = time.perf_counter()
    with absent_gpu(gpu, lambda kernel: kernels.extend(_compiled(kernel))), allocating("meta"):
        call = lowered(step)
    return CompiledStep(
        call=call, step=step, kernels=tuple(kernels), seconds=time.perf_counter() - started
    )


def lowered(step: CudaStep) -> Callable[..., Any]:
    """The step as code for the GPU that is there, or not; nothing is kept on disk."""
    call: Callable[..., Any] = _torch_compat.standalone_compile(
        step.graph_module, step.fakes, OPTIONS
    )
    return call


def _compiled(kernel: Any) -> Iterator[Kernel]:
    """What takes the place of `CachingAutotuner.precompile`: no launcher is made."""
    if kernel.compile_results:
        return
    kernel._precompile_worker()
    for result in kernel.compile_results:
        made = result.kernel
        path = getattr(made, "cubin_path", None)
        code = Path(path).read_bytes() if path else made.asm["cubin"]
        shared = made.metadata.shared if hasattr(made, "metadata") else made.shared
        yield resources(kernel.fn.__name__, code, shared)


@contextlib.contextmanager
def compiling_launches(launched: Callable[..., None]) -> Iterator[None]:
    """Within, a launch of a `@triton.jit` function compiles it for Triton's active driver, and runs
    nothing; `launched(kernel, arguments, grid)` is told.
    """
    launch = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        made = launch(self, *args, grid=grid, warmup=True, **given)
        used = resources(self.__name__, made.asm["cubin"], made.metadata.shared)
        launched(used, args, tuple(grid))

    with mock.patch.object(JITFunction, "run", run):
        yield


def resources(name: str, machine_code: bytes, shared: int) -> Kernel:
    """What a kernel uses, by its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(machine_code)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return Kernel(name=name, registers=int(found[1]), stack=int(found[2]), shared=shared)
