"""Values of Triton kernels: after the real launch, Triton's interpreter runs the kernel over the
same memory.  `attach()` takes plain kernels and those that Inductor generates.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter, jit

from tools.fake_cuda import device

_is_running = [False]
runs: dict[str, int] = {}
"""How often each kernel was interpreted."""


def attach() -> None:
    """From now on, in this process, for good."""
    dot = interpreter.InterpreterBuilder.create_dot  # bfloat16 lies there as integers
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = lambda self, a, b, *rest: dot(self, _widened(a), _widened(b), *rest)
    jit.JITFunction.__call__ = _call
    jit.JITFunction.run = _plain(jit.JITFunction.run)
    from torch._inductor.runtime import triton_heuristics

    autotuner: Any = triton_heuristics.CachingAutotuner
    autotuner.run = _generated(autotuner.run)


def _plain(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launch of a kernel that somebody wrote, and its values."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            _check_device(self.fn.__name__, args)
        made = launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        if not warmup and device.is_outermost():
            known = {name: value for name, value in kwargs.items() if name in self.arg_names}
            if callable(grid):
                bound = inspect.signature(self.fn).bind(*args, **known)
                bound.apply_defaults()
                grid = grid(dict(bound.arguments))
            _enqueue(self.fn, args, tuple(grid), known)
        return made

    return run


def _generated(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launch of a kernel that Inductor generated, and its values."""

    def run(self: Any, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> Any:
        result = launch(self, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)
        if not benchmark_run and device.is_outermost():
            self._ensure_kernel_loaded()  # one from a worker or a cache has no Python function
            config = self.launchers[0].config
            given, grid = self._interpret_args_grid(args, config)
            constants = {
                name: value
                for name, value in self.triton_meta.get("constants", {}).items()
                if name not in self.fn.arg_names[: len(given)]
            }
            _enqueue(self.fn.fn, given, grid, {**constants, **config.kwargs})
        return result

    return run


def _check_device(name: str, args: Sequence[Any]) -> None:
    """Triton launches on the current device, wherever its arguments lie."""
    current = torch.cuda.current_device()
    for one in args:
        if isinstance(one, Tensor) and one.is_cuda and one.device.index != current:
            device.fault(f"device guard: {name} on cuda:{current} with memory of {one.device}")


def _enqueue(function: Any, args: Any, grid: Any, kwargs: Mapping[str, Any]) -> None:
    touches = [
        device.Range(one.data_ptr(), one.data_ptr() + _extent(one) * one.element_size(), 0)
        for one in args
        if isinstance(one, Tensor) and one.is_cuda and one.numel()
    ]
    args = tuple(map(on_host, args))
    kwargs = {name: on_host(value) for name, value in kwargs.items()}
    name = function.__name__

    def run() -> None:
        runs[name] = runs.get(name, 0) + 1
        _is_running[0] = True
        try:
            with torch.no_grad():
                _interpreted(function).run(*args, grid=grid, warmup=False, **kwargs)
        finally:
            _is_running[0] = False

    device.enqueue(name, run, touches)


def on_host(value: Any) -> Any:
    """A CPU tensor over the memory of a CUDA tensor; anything else as it is."""
    if isinstance(value, tuple):
        parts = tuple(map(on_host, value))
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    if value.numel() == 0:
        return torch.empty_like(value, device="cpu")
    num_bytes = _extent(value) * value.element_size()
    buffer = (ctypes.c_byte * num_bytes).from_address(value.data_ptr())
    flat = torch.frombuffer(buffer, dtype=torch.uint8).view(value.dtype)
    return flat.as_strided(value.shape, value.stride())


def _extent(value: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))


# --- Triton's interpreter, with what it lacks ---


@functools.cache
def _interpreted(function: Any) -> Any:
    names = {**function.__globals__, "libdevice": _Libdevice()}
    names |= {"_language": tl, "_core": tl.core}  # modules that the interpreter patches
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__annotations__, copy.__kwdefaults__ = function.__annotations__, function.__kwdefaults__
    return interpreter.InterpretedFunction(copy)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_running[0]:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")
    return _interpreted(self.fn).rewrite()(*args, **kwargs)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


class _Libdevice:
    """CUDA's math functions by numpy's."""

    _OTHERS: Mapping[str, Any] = {
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "erf": np.vectorize(math.erf, otypes=[np.float32]),
        "pow": np.power,
        "nearbyint": np.rint,
    }

    def __getattr__(self, name: str) -> Any:
        return _lifted(self._OTHERS[name] if name in self._OTHERS else getattr(np, name))


def _lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        first = next(one for one in given if isinstance(one, tl.tensor))
        data = function(*(one.handle.data if isinstance(one, tl.tensor) else one for one in given))
        is_bool = data.dtype == np.bool_
        scalar = tl.int1 if is_bool else first.dtype
        kind = tl.block_type(scalar, list(first.shape)) if first.type.is_block() else scalar
        values = data.astype(np.bool_ if is_bool else first.handle.data.dtype)
        return tl.tensor(interpreter.TensorHandle(values, scalar), kind)

    return run
