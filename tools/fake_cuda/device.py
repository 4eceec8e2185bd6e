"""The fake device for Python: values for operators, switches, and what the driver saw."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tools.fake_cuda.build import DRIVER, VALUES, library_folder

_TEXTS = ("fake_refusals", "fake_faults", "fake_kernels", "fake_graph", "fake_uses")
_kernels: dict[str, Callable[..., Any]] = {}  # the project's, by operator
_COUNTS = ("fake_launches", "fake_replays", "fake_pending")


def is_here() -> bool:
    """Whether this process runs on the fake device."""
    return torch.version.cuda is not None and (library_folder() / VALUES).exists()


class Range(ctypes.Structure):
    """Memory that a command touches, as the driver describes it."""

    _fields_ = (
        ("begin", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("writes", ctypes.c_int),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    # Triton links its launcher with the driver, and asks ldconfig where that is.
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(library_folder()))
    driver = ctypes.CDLL(DRIVER)
    for name in _TEXTS:
        getattr(driver, name).restype = ctypes.c_char_p
    for name in _COUNTS:
        getattr(driver, name).restype = ctypes.c_long
    driver.fake_graph.argtypes = [ctypes.c_void_p]
    driver.fake_switch.argtypes = [ctypes.c_char_p, ctypes.c_long]
    driver.fake_fault.argtypes = [ctypes.c_char_p]
    return driver


@functools.cache
def _values(*, holds_gil: bool = False) -> ctypes.CDLL:
    library = (ctypes.PyDLL if holds_gil else ctypes.CDLL)(str(library_folder() / VALUES))
    library.values_missing.restype = library.values_of.restype = ctypes.c_char_p
    library.values_attach.argtypes = [ctypes.c_char_p]
    return library


def attach(*spaces: str) -> dict[str, int]:
    """Give values to every operator of these name spaces that has a CUDA kernel.

    Torch's own is "aten"; registering again is harmless, and gives new operators theirs.
    """
    _driver()
    torch.cuda.init()  # its allocators, which are followed, exist from then on
    return {space: _values().values_attach(space.encode()) for space in spaces or ("aten",)}


def attach_project() -> None:
    """Give values to torch's operators and to all of the project's, whose Triton kernels are then
    not launched, and not compiled ahead.
    """
    import compilespec.ops
    from compilespec.ops._library import TRITON_KERNELS

    for module in pkgutil.iter_modules(compilespec.ops.__path__):
        if module.ispkg:
            importlib.import_module(f"compilespec.ops.{module.name}")
    attach("aten", "compilespec")
    _kernels.update(TRITON_KERNELS)
    TRITON_KERNELS.clear()


@contextlib.contextmanager
def own_kernels() -> Iterator[None]:
    """Within, the project's operators run their Triton kernels, which `interpreter` interprets."""
    from compilespec.ops._library import TRITON_KERNELS

    TRITON_KERNELS.update(_kernels)
    _values().values_pass(b"compilespec", 1)
    try:
        yield
    finally:
        _values().values_pass(b"compilespec", 0)
        TRITON_KERNELS.clear()


def refusals() -> list[str]:
    """Calls that the driver refused since the last question, each with its error's name."""
    return _lines(_driver().fake_refusals())


def faults() -> list[str]:
    """What a GPU would not have told since the last question: accesses without order, staging that
    was refilled too early, uses after a free, a place outside a tensor.
    """
    return _lines(_driver().fake_faults())


def fault(text: str) -> None:
    """Add a fault to the driver's list."""
    _driver().fake_fault(text.encode())


def nodes(graph: torch.cuda.CUDAGraph) -> list[str]:
    """The nodes of a captured graph, in order."""
    return _lines(_driver().fake_graph(graph.raw_cuda_graph_exec()))


def kernels() -> dict[str, int]:
    """How often each kernel was launched, by its mangled name."""
    lines = (line.split(" ", 1) for line in _lines(_driver().fake_kernels()))
    return {name: int(count) for count, name in lines}


def allocations() -> list[str]:
    """How often memory was asked of the driver, by call and by the device that was current."""
    return _lines(_driver().fake_uses())


def num_launches() -> int:
    return int(_driver().fake_launches())


def num_replays() -> int:
    return int(_driver().fake_replays())


def num_pending() -> int:
    """Commands that no stream has executed yet."""
    return int(_driver().fake_pending())


def without_values() -> list[str]:
    """Operators that ran without values: they have no CPU kernel."""
    return _lines(_values().values_missing())


def is_outermost() -> bool:
    """Whether this thread is not inside an operator whose value the CPU gives."""
    return not _values().values_depth()


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Within, commands wait until somebody waits for them: the latest schedule that is allowed."""
    _driver().fake_switch(b"lazy", 1)
    try:
        yield
    finally:
        _driver().fake_switch(b"lazy", 0)


@contextlib.contextmanager
def memory_of(mib: int) -> Iterator[None]:
    """Within, every device has so much memory."""
    _driver().fake_switch(b"mib", mib)
    try:
        yield
    finally:
        _driver().fake_switch(b"mib", 80 << 10)


def enqueue(name: str, function: Callable[[], Any], touches: Sequence[Range] = ()) -> None:
    """Put a Python function on the current stream; during capture it becomes a node."""
    places = (Range * len(touches))(*touches)
    _values(holds_gil=True).values_enqueue_python(
        name.encode(), ctypes.py_object(function), places, len(touches)
    )


def _lines(text: bytes) -> list[str]:
    return text.decode().splitlines()
