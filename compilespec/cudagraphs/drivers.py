"""What makes graphs: CUDA, or an emulation on any device that executes captured calls again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

Call = Callable[[], Sequence[Tensor]]


class Graph(Protocol):
    """One captured call."""

    def replay(self) -> None:
        """Run it again; what it made stands where it stood."""


class Driver(Protocol):
    """Captures calls into one memory pool."""

    name: str

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that belongs to one bucket."""
        ...

    def capture(self, call: Call) -> tuple[Graph, Sequence[Tensor]]:
        """Capture a call and run it once; returns the graph and the tensors that it makes."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """The same memory, not kept from being used for something else."""
        ...

    def expiry(self, tensor: Tensor) -> Callable[[], None] | None:
        """What to do in a replay once nobody reads the tensor any more, if anything."""
        ...

    def free_bytes(self) -> int | None:
        """Free memory of the device; None where it does not limit anything."""
        ...

    def reserved_bytes(self) -> int:
        """Memory taken from the device."""
        ...


class CudaDriver:
    """CUDA graphs in one private pool, captured on one side stream."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            torch.cuda.synchronize(self._device)

    def capture(self, call: Call) -> tuple[Graph, Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do on the device meanwhile does not spoil the capture
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            made = call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture was invalidated
                graph.capture_end()
            raise
        graph.capture_end()
        graph.replay()  # capturing executes nothing, and what comes next may read the result
        return graph, made

    def weak(self, tensor: Tensor) -> Tensor:
        return weak_tensor(tensor)

    def expiry(self, tensor: Tensor) -> Callable[[], None] | None:
        return None  # the pool gave the memory to whoever came next

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)


class EmulatedDriver:
    """A replay executes the captured call again and copies what it makes to where it first stood.

    What expires is poisoned, as memory of a pool is that somebody else writes.
    """

    name = "emulated"

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capture(self, call: Call) -> tuple[Graph, Sequence[Tensor]]:
        made = [tensor.clone() for tensor in call()]  # storages of their own, to poison alone
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
    return CudaDriver(device) if device.type == "cuda" else EmulatedDriver()


def poison(tensor: Tensor) -> None:
    """NaN, the lowest integer, or True: values that show when somebody uses them."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def weak_tensor(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it allocated (CUDA).

    Whoever holds it must know by other means that the memory still is what it was.
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
