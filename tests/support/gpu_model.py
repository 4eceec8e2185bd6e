"""An executable model of a GPU in host memory: streams, events, pinned copies, graphs and pools.

What is asked of the device is queued, and done when the device gets there: a test chooses how far
it lags behind (`Pace`), down to never before somebody waits.  So code that relies on an order that
nothing enforces reads old values under some pace, on any machine.  The code under test runs as it
is; `Gpu.installed` puts the model in place of what it uses of `torch.cuda`.

streams    Commands of one stream run in order; those of two streams in any, but for events.
events     `synchronize` waits for the last `record`.  A record without a stream is one on the
           current device, whichever device the work is on.
copies     From pinned memory with `non_blocking` the memory is read when the device gets there.
           From pageable memory, and to it, the host waits for the stream (`counts`).
host       Memory that a copy will fill holds garbage until it has run.
graphs     A capture runs nothing; a replay runs its commands on the memory of the capture.  Waiting
           while a stream captures is an error, and spoils the capture.
host       Pinned memory belongs to the device that is current when it is asked for (`counts`).
pools      Memory that a capture took and nothing holds any more belongs to what is captured next in
           the same pool: there it is overwritten.  Other memory that nothing holds is overwritten
           as soon as the device gets there.
kernels    `Kernel` makes a launch of a compiled call; other operators are launches by themselves.

Not modelled: speed, sizes of memory, and rounding.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Command = Callable[[], object]
Pace = Literal["at once", "when waited for"] | int  # a number seeds one that changes all the time

_aten = torch.ops.aten
_WAITING = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default}


class Stream:
    """Commands in order.  `before` of a command is what must have happened first."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device(device if device is not None else "cuda:0")
        self.queue: deque[tuple[Mark | None, Command]] = deque()
        self.graph: Graph | None = None  # that is being captured

    def wait_stream(self, other: Stream) -> None:
        mark = Mark()
        other.queue.append((None, mark.happen))
        self.queue.append((mark, lambda: None))

    def wait_event(self, event: Any) -> None:
        self.queue.append((event.mark, lambda: None))


class Mark:
    """A place in a stream."""

    def __init__(self) -> None:
        self.happened = False

    def happen(self) -> None:
        self.happened = True


class Graph:
    """Captured commands."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.commands, self.is_spoilt = gpu, [], False
        self._stream: Stream | None = None
        self.pool: Pool | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = self.gpu.current_stream()
        if stream is self.gpu.streams[stream.device]:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._stream, self.pool = stream, pool
        stream.graph = self.gpu.graph = self
        self.commands = [spoil(memory) for memory in pool.free]

    def capture_end(self) -> None:
        assert self._stream is not None
        self._stream.graph = self.gpu.graph = None
        for memory in self.gpu.freed_meanwhile:
            self.gpu.enqueue(spoil(memory))
        self.gpu.freed_meanwhile.clear()
        if self.is_spoilt:
            raise RuntimeError("CUDA error: an earlier error spoilt the capture")

    def replay(self) -> None:
        self.gpu.counts["replays"] += 1
        self.gpu.enqueue(*self.commands)


class Pool:
    """Memory of captures."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []


class Block:
    """Memory on the device, as long as something holds it."""

    def __init__(self, gpu: Gpu, memory: Tensor, pool: Pool | None) -> None:
        self._gpu, self._memory, self._pool = gpu, memory, pool

    def __del__(self) -> None:
        gpu, graph = self._gpu, self._gpu.graph
        if gpu.is_closed:
            return
        if self._pool is not None:
            self._pool.free.append(self._memory)
            if graph is not None and graph.pool is self._pool:
                graph.commands.append(spoil(self._memory))
        elif graph is not None:
            gpu.freed_meanwhile.append(self._memory)
        else:
            gpu.enqueue(spoil(self._memory))


def spoil(memory: Tensor) -> Command:
    """What another owner of the memory does to it: values that are legal, and wrong."""
    return lambda: memory.fill_(float("nan") if memory.dtype.is_floating_point else 1)


class DeviceTensor(Tensor):
    """A tensor of the model: `inner` is its memory; `block` keeps it, unless it is a weak one."""

    inner: Tensor
    block: Block | None
    gpu: Gpu
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, gpu: Gpu, inner: Tensor, block: Block | None) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device="cpu",
        )  # fmt: skip
        made.gpu, made.inner, made.block = gpu, inner, block
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.gpu.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def cpu(self, *given: Any) -> Tensor:  # type: ignore[override]
        self.gpu.wait("pageable copy out")
        return self.inner.clone()

    def to(self, *given: Any, **named: Any) -> Any:
        if any(str(value) == "cpu" for value in (*given, *named.values())):
            return self.cpu()
        return super().to(*given, **named)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        leaves = tree_flatten((args, kwargs or {}))[0]
        gpu = next(leaf.gpu for leaf in leaves if isinstance(leaf, DeviceTensor))
        return gpu.operate(func, args, kwargs or {}, leaves)


class Gpu:
    """A device, and all that is queued for it.

    Args:
        pace: how far it lags behind; device: its name, such as cuda:1, while cuda:0 is current.
    """

    def __init__(self, pace: Pace, device: str = "cuda:1") -> None:
        self.device = torch.device(device)
        self.counts: Counter[str] = Counter()
        self.graph: Graph | None = None  # that is being captured
        self.freed_meanwhile: list[Tensor] = []
        self.is_closed = False
        self.streams: dict[torch.device, Stream] = {}  # the default ones
        self._all: list[Stream] = []
        self._current: dict[torch.device, Stream] = {}
        self._device = torch.device("cuda:0")  # the current one
        self._pace = pace
        self._random = random.Random(pace if isinstance(pace, int) else 0)
        self._pinned: dict[int, Tensor] = {}  # by address, and never given back
        for name in {"cuda:0", device}:
            self.streams[torch.device(name)] = self._current[torch.device(name)] = self.stream(name)

    # --- what is queued ---

    def enqueue(self, *commands: Command) -> None:
        """Put commands into the device's current stream, or into the graph that it captures."""
        stream = self.current_stream(self.device)
        if stream.graph is not None:
            stream.graph.commands.extend(commands)
            return
        stream.queue.extend((None, command) for command in commands)
        self._proceed()

    def wait(self, why: str, mark: Mark | None = None) -> None:
        """The host waits for a mark, or for all of the device."""
        self.counts[why] += 1
        if self.graph is not None:
            self.graph.is_spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        while not (mark.happened if mark is not None else not any(s.queue for s in self._all)):
            assert self._run_one(), "the streams wait for each other"

    def _proceed(self) -> None:
        """The device does some of what it has, as its pace has it."""
        if self._pace == "when waited for":
            return
        count = -1 if self._pace == "at once" else self._random.choice((0, 0, 1, 3, 10, 100))
        while count != 0 and self._run_one():
            count -= 1

    def _run_one(self) -> bool:
        """A command of any stream that need not wait for another."""
        ready = [s for s in self._all if s.queue and (s.queue[0][0] or _PAST).happened]
        if not ready:
            return False
        _, command = self._random.choice(ready).queue.popleft()
        with torch.no_grad():
            command()
        return True

    # --- memory ---

    def put(self, value: Tensor) -> DeviceTensor:
        """A tensor of the device that holds these values, from its beginning."""
        return self._hold(value.clone())

    def _new(self, like: Tensor) -> DeviceTensor:
        """Memory of a tensor's form; what is in it is legal, and wrong."""
        inner = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        spoil(inner)()
        return self._hold(inner)

    def _hold(self, inner: Tensor) -> DeviceTensor:
        pool = self.graph.pool if self.graph is not None else None
        return DeviceTensor(self, inner, Block(self, inner, pool))

    def weak(self, tensor: Any) -> DeviceTensor:
        return DeviceTensor(self, tensor.inner, None)

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    # --- operators ---

    def operate(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        """An operator with an argument on the device."""
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1], bool(args[2:] and args[2]))
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        if func in _WAITING:
            self.wait("scalars read")
            return func(*inner_args, **inner_kwargs)
        on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        returns = func._schema.returns
        if returns and all(one.alias_info and not one.alias_info.is_write for one in returns):
            made, first = func(*inner_args, **inner_kwargs), on_device[0]
            return tree_map(lambda one: DeviceTensor(self, one, first.block), made)
        if any(_is_host(leaf) and leaf.dim() for leaf in leaves):
            self.wait("pageable copy in")
        return self.launch(func, args, kwargs)

    def launch(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call when the device gets there; its results' memory is there now."""
        self.counts["launches"] += 1
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        written = [
            args[place]
            for place, one in enumerate(getattr(call, "_schema", _NOTHING).arguments)
            if one.alias_info is not None and one.alias_info.is_write and place < len(args)
        ]
        returns = getattr(call, "_schema", _NOTHING).returns
        if returns and all(one.alias_info is not None for one in returns):  # in place
            self.enqueue(lambda: call(*inner_args, **inner_kwargs))
            return written[0] if len(returns) == 1 else tuple(written)
        likes, form = tree_flatten(_results(call, inner_args, inner_kwargs))
        made = [self._new(like) for like in likes]
        memory = [one.inner for one in made]

        def run() -> None:
            values = tree_flatten(call(*inner_args, **inner_kwargs))[0]
            for place, value in zip(memory, values, strict=True):
                place.copy_(value)

        self.enqueue(run)
        return tree_unflatten(made, form)

    def _copy(self, target: Any, source: Any, non_blocking: bool) -> Any:
        to, of = _inner(target), _inner(source)
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            self.counts["launches"] += 1
            self.enqueue(lambda: to.copy_(of))
            return target
        way, host = ("in", of) if isinstance(target, DeviceTensor) else ("out", to)
        if non_blocking and self._is_pinned(host):
            self.counts[f"pinned copy {way}"] += 1
            if way == "out":
                spoil(to)()
            self.enqueue(lambda: to.copy_(of))
        else:
            self.wait(f"pageable copy {way}")
            to.copy_(of)
        return target

    # --- in place of torch.cuda ---

    def stream(self, device: Any = None) -> Stream:
        made = Stream(device if device is not None else self._device)
        self._all.append(made)
        return made

    def current_stream(self, device: Any = None) -> Stream:
        device = torch.device(device) if device is not None else self._device
        return self._current[device]

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        device, before = self._device, self._current[stream.device]
        self._device, self._current[stream.device] = stream.device, stream
        try:
            yield
        finally:
            self._device, self._current[stream.device] = device, before

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self._device = self._device, torch.device(device)
        try:
            yield
        finally:
            self._device = before

    @property
    def current_device(self) -> torch.device:
        return self._device

    @contextlib.contextmanager
    def installed(self) -> Iterator[Gpu]:
        """Within, tensors that are asked for on a CUDA device are the model's."""
        gpu = self

        class Event:
            mark: Mark | None = None

            def record(self, stream: Stream | None = None) -> None:
                self.mark = Mark()
                place = stream or gpu.current_stream()
                place.queue.append((None, self.mark.happen))
                gpu._proceed()

            def synchronize(self) -> None:
                if self.mark is not None:
                    gpu.wait("events waited for", self.mark)

        cuda = {
            "Event": Event,
            "Stream": self.stream,
            "CUDAGraph": lambda: Graph(gpu),
            "current_stream": self.current_stream,
            "stream": self.on_stream,
            "device": self.on_device,
            "synchronize": lambda device=None: gpu.wait("synchronised"),
            "graph_pool_handle": Pool,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (2**33, 2**34),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
        }
        makers = ("empty", "empty_strided", "zeros", "full", "tensor", "arange")
        with contextlib.ExitStack() as stack:
            for name, value in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            for name in makers:
                patched = self._maker(name, getattr(torch, name))
                stack.enter_context(mock.patch.object(torch, name, patched))
            stack.enter_context(mock.patch("compilespec.cudagraphs.drivers.weak_tensor", self.weak))
            stack.enter_context(mock.patch("gc.collect"))  # memory here is freed without it
            try:
                yield self
            finally:
                self.is_closed = True

    def _maker(self, name: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            device, is_pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
            if is_pinned:
                self.counts["pinned elsewhere"] += self._device != self.device
                return self.pin(real(*args, **kwargs))
            if device is None or torch.device(device).type != "cuda":
                return real(*args, **kwargs)
            if name == "tensor":  # through pageable memory
                self.wait("pageable copy in")
            values = real(*args, **{**kwargs, "device": "cpu"})
            made = self._new(values)
            memory = made.inner
            if not name.startswith("empty"):
                self.enqueue(lambda: memory.copy_(values))
            return made

        return make


class Kernel:
    """A compiled call as one launch; `waits` of one that needs the host in its middle."""

    def __init__(self, gpu: Gpu, call: Callable[..., Any], *, waits: bool = False) -> None:
        self._gpu, self._call, self._waits = gpu, call, waits

    def __call__(self, *inputs: Any) -> Any:
        if self._waits:
            self._gpu.wait("kernels that wait")
        return self._gpu.launch(self._call, inputs, {})


class _Past:
    happened = True


class _Nothing:
    arguments: tuple[Any, ...] = ()
    returns: tuple[Any, ...] = ()


_PAST, _NOTHING = _Past(), _Nothing()


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


def _is_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DeviceTensor)


_KNOWN: MutableMapping[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # by call, by its inputs


def _results(call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a call returns, without its values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    leaves = tree_flatten((args, dict(kwargs)))[0]
    form = str([(v.shape, v.dtype, v.stride()) if isinstance(v, Tensor) else v for v in leaves])
    known = _KNOWN.setdefault(call, {})
    if form not in known:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.no_grad():
            fakes = tree_map(
                lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, (args, dict(kwargs))
            )
            known[form] = call(*fakes[0], **fakes[1])
    return known[form]
