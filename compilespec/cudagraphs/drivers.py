"""Capture and replay: CUDA graphs, or an emulation that executes captured calls again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from compilespec import _torch_compat
from compilespec.ops.device import traits_of

Call = Callable[[], Sequence[Tensor]]


class CaptureFailed(Exception):
    """The call did something that no graph can hold, such as waiting for the device."""


class Graph(Protocol):
    """One captured call."""

    def replay(self) -> None:
        """Run it again; its results are written to the same addresses."""


class Driver(Protocol):
    """Captures calls into one memory pool."""

    name: str

    def prepare(self) -> None:
        """The work that is done once, before many buckets are captured."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """A context around everything that belongs to one bucket."""
        ...

    def make_room(self) -> None:
        """Give back the memory that nothing holds: during a capture that is impossible."""

    def capture(self, call: Call) -> tuple[Graph, Sequence[Tensor]]:
        """Capture a call and run it once; returns the graph and the tensors it produces.

        Raises: CaptureFailed, torch.OutOfMemoryError; other calls can still be captured.
        """
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory that does not keep it from being reused."""
        ...

    def expiry(self, tensor: Tensor) -> Callable[[], None] | None:
        """A function that a replay runs after the last read of the tensor; None for nothing."""
        ...

    def free_bytes(self) -> int | None:
        """Free memory of the device in bytes; None where memory is not limited."""
        ...

    def reserved_bytes(self) -> int:
        """Memory allocated on the device, in bytes."""
        ...


class CudaDriver:
    """CUDA graphs in one private pool, captured on one side stream."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._spoilt: list[Any] = []  # failed graphs, which torch's allocators may ask again about

    def prepare(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """On the side stream, and without collections: garbage may be graphs and events."""
        collects = gc.isenabled()
        gc.disable()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            if collects:
                gc.enable()

    def make_room(self) -> None:
        torch.cuda.empty_cache()

    def capture(self, call: Call) -> tuple[Graph, Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device during the capture
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            made = call()
            graph.capture_end()
        except BaseException as error:
            self._abandon(graph)
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise CaptureFailed((str(error).splitlines() or [""])[0]) from error
            raise
        graph.replay()  # capturing executes nothing, and the next capture may read the result
        return graph, made

    def _abandon(self, graph: Any) -> None:
        """End a failed capture, in torch's allocator too.  torch itself leaves its allocator inside
        a spoilt capture, where it could not give memory back any more; and a pool that the last
        graph left, as the first one that fails would, cannot be captured into again.
        """
        self._spoilt.append(graph)
        try:
            graph.capture_end()
        except RuntimeError:
            _torch_compat.end_allocating(self._device, self._pool)

    def weak(self, tensor: Tensor) -> Tensor:
        return weak_tensor(tensor)

    def expiry(self, tensor: Tensor) -> Callable[[], None] | None:
        return None  # the pool has already reused the memory

    def free_bytes(self) -> int | None:
        """The memory of the device, and what torch's allocator holds for nobody."""
        cached = self.reserved_bytes() - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + cached

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)


class EmulatedDriver:
    """A replay executes the captured call again and copies its results to their first addresses.

    Expired values are poisoned: in a graph's pool, other results would overwrite them.
    """

    name = "emulated"

    def prepare(self) -> None: ...

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def make_room(self) -> None: ...

    def capture(self, call: Call) -> tuple[Graph, Sequence[Tensor]]:
        made = [tensor.clone() for tensor in call()]  # separate storages to poison
        return _CallAgain(call, made), made

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor

    def expiry(self, tensor: Tensor) -> Callable[[], None] | None:
        return lambda: poison(tensor)

    def free_bytes(self) -> int | None:
        return None

    def reserved_bytes(self) -> int:
        return 0


class _CallAgain:
    def __init__(self, call: Call, made: Sequence[Tensor]) -> None:
        self._call, self._made = call, made

    def replay(self) -> None:
        for old, new in zip(self._made, self._call(), strict=True):
            old.copy_(new)


def make_driver(device: torch.device) -> Driver:
    return CudaDriver(device) if traits_of(device).is_cuda else EmulatedDriver()


def poison(tensor: Tensor) -> None:
    """Fill with NaN, the lowest integer, or True: using such values shows."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def weak_tensor(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it allocated (CUDA).

    The holder must know by other means that the memory has not been reused.
    """
    if tensor.numel() == 0:
        return torch.empty_like(tensor)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _Memory(tensor.data_ptr(), extent * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes on the device, as the CUDA array interface describes them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 2,
        }  # fmt: skip
