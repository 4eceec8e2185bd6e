"""Makes torch, Inductor and Triton believe in a GPU, for as long as a block lasts.

Graphs of fake CUDA tensors are then lowered by a CPU build of torch as they would be on the GPU;
nothing can be launched.  The private names of torch that stand for a device are all in this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from tools.without_gpu.gpus import Driver, Gpu

Compiling = Callable[[Any], None]  # takes an Inductor kernel, before its first launch

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar registrar(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""


@contextlib.contextmanager
def absent_gpu(gpu: Gpu, compiling: Compiling | None = None) -> Iterator[None]:
    """Within, `gpu` is CUDA's device 0.

    Args:
        compiling: called for each kernel that Inductor generates, in place of compiling it and
            making a launcher; None leaves both to Inductor, which suits Triton's interpreter.
    """
    _load_guard()
    with contextlib.ExitStack() as stack:
        _patch(stack, triton.runtime.driver, _active=Driver(gpu))
        _patch_torch(stack, gpu)
        _patch_inductor(stack, compiling)
        _keep_constants_on_the_host(stack)
        stack.callback(_forget)
        _forget()
        yield


@functools.cache
def _load_guard() -> None:
    """Register a device guard that does nothing.  A CPU build has none, and operations in place on
    fake CUDA tensors ask for it ("PyTorch is not linked with support for cuda devices").
    """
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", "-o", str(library),
                   str(source), f"-L{root}/lib", "-lc10"]  # fmt: skip
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


def _patch_torch(stack: contextlib.ExitStack, gpu: Gpu) -> None:
    """`torch.cuda`, and the same through Dynamo's device interface."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensorMode

    devices: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: gpu.properties,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "synchronize": lambda *args: None,
        "set_device": lambda index: None,
        "memory_allocated": lambda *args: 0,
    }
    exchange = {"exchange_device": lambda i: 0, "maybe_exchange_device": lambda i: 0}
    _patch(
        stack, torch.cuda, **devices, **{f"_{name}": call for name, call in exchange.items()},
        _is_compiled=lambda: True, get_device_capability=lambda device=None: gpu.capability,
        get_rng_state=lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *args, **kwargs: None, get_device_name=lambda *args: gpu.name,
        mem_get_info=lambda *args: (gpu.memory_bytes - (10 << 30), gpu.memory_bytes),
    )  # fmt: skip
    static = {name: staticmethod(call) for name, call in (devices | exchange).items()}
    stream = staticmethod(lambda index: 0)
    _patch(stack, CudaInterface, device=_NoGuard, get_raw_stream=stream, **static)
    worker = {name: static[name] for name in ("get_device_properties", "current_device")}
    _patch(stack, CudaInterface.Worker, **worker)
    _patch(stack, torch._C, _cuda_getCurrentRawStream=lambda index: 0)
    _patch(stack, torch.version, cuda="13.0")
    _patch(stack, FakeTensorMode, avoid_device_init=property(lambda self: True))


def _patch_inductor(stack: contextlib.ExitStack, compiling: Compiling | None) -> None:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    _patch(stack, triton_helpers, set_driver_to_gpu=lambda: None)
    _patch(stack, PythonWrapperCodegen, generate_and_run_autotune_block=_compile_block)
    if compiling is not None:
        _patch(stack, CachingAutotuner, precompile=lambda self, *args, **kwargs: compiling(self))


def _compile_block(self: Any) -> None:
    """Compile what the wrapper calls; the calls that would time it are left out."""
    exec(self.kernel_autotune_defs.getvalue() + "\nasync_compile.wait(globals())\n", {})


def _keep_constants_on_the_host(stack: contextlib.ExitStack) -> None:
    """One-element constants, which Inductor folds by running operations on the device."""

    def empty(size: Any, dtype: Any = None, **given: Any) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **given: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("empty_strided", empty_strided, "CUDA")
    stack.callback(library._destroy)


@contextlib.contextmanager
def allocating(device: str) -> Iterator[None]:
    """Within, code that is compiled for CUDA is loaded so that it allocates on `device`."""
    with contextlib.ExitStack() as stack:
        _patch(
            stack,
            torch._C._dynamo.guards,
            _empty_strided_cuda=lambda size, stride, dtype: torch.empty_strided(
                size, stride, dtype=dtype, device=device
            ),
        )
        yield


@contextlib.contextmanager
def launching(call: Callable[..., None]) -> Iterator[None]:
    """Within, `call(kernel, *arguments)` takes the launches of Inductor's kernels."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with contextlib.ExitStack() as stack:
        _patch(stack, CachingAutotuner, run=lambda self, *args, **kwargs: call(self, *args))
        yield


def programs_of(kernel: Any, arguments: Sequence[Any]) -> int:
    """Of a launch of one of Inductor's kernels: with the configuration that gives the fewest."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    named = dict(zip(kernel.fn.arg_names, arguments, strict=False))
    grids = [
        GridExpr.from_meta(kernel.inductor_meta, result.config).eval_slow(named)
        for result in kernel.compile_results
    ]
    return min(math.prod(grid) for grid in grids)


@contextlib.contextmanager
def counting(seen: Callable[[str], None]) -> Iterator[None]:
    """Within, `seen` gets the name of each of Inductor's kernels that is launched."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launch: Any = CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        _patch(stack, CachingAutotuner, run=run)
        yield


class _NoGuard:
    def __init__(self, *given: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *given: Any) -> None:
        pass


def _patch(stack: contextlib.ExitStack, target: Any, **values: Any) -> None:
    for name, value in values.items():
        stack.enter_context(mock.patch.object(target, name, value, create=True))


def _forget() -> None:
    """Drop what torch remembers of the devices that it has seen."""
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    for value in (*vars(_triton).values(), DeviceProperties.create):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
