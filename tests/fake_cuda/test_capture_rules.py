"""What may not be done while a stream captures, and what must be seen at other times, by name."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tools.fake_cuda import device

pytestmark = pytest.mark.fake_cuda


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing is left from the test before; nobody waits."""
    torch.cuda.synchronize()
    device.refusals(), device.faults()
    yield
    torch.cuda.synchronize()
    device.refusals(), device.faults()


def captured(call: Callable[[], object], pool: object = None) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            call()
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its stream behind
    return graph


@pytest.fixture(scope="module")
def outside() -> torch.cuda.Event:
    """An event that was recorded before any capture."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _fork(tensor: Tensor, *, joins: bool) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.clone()
    if joins:
        torch.cuda.current_stream().wait_stream(side)


def _elsewhere(event: torch.cuda.Event) -> None:
    thread = threading.Thread(target=lambda: _swallow(event.query))
    thread.start()
    thread.join()


def _swallow(call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):
        call()


UNSUPPORTED = "cudaErrorStreamCaptureUnsupported"
MUST_FAIL: dict[str, tuple[Callable[[Tensor, torch.cuda.Event], object], str]] = {
    "item": (lambda x, e: x[0].item(), f"cudaStreamSynchronize: {UNSUPPORTED}"),
    "synchronize": (lambda x, e: torch.cuda.synchronize(), f"cudaDeviceSynchronize: {UNSUPPORTED}"),
    "wait for the stream": (
        lambda x, e: torch.cuda.current_stream().synchronize(),
        f"cudaStreamSynchronize: {UNSUPPORTED}",
    ),
    "ask the stream": (
        lambda x, e: torch.cuda.current_stream().query(),
        f"cudaStreamQuery: {UNSUPPORTED}",
    ),
    "pageable copy in": (
        lambda x, e: x.copy_(torch.ones(8), non_blocking=True),
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless",
    ),
    "pageable copy out": (
        lambda x, e: torch.empty(8).copy_(x, non_blocking=True),
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless",
    ),
    "copy to the CPU": (lambda x, e: x.cpu(), "Cannot copy between CPU and CUDA tensors"),
    "a stray CPU constant": (
        lambda x, e: x + torch.ones(8).to("cuda"),
        "Cannot copy between CPU and CUDA tensors",
    ),
    "sizes that values decide": (lambda x, e: x.nonzero(), f"cudaStreamSynchronize: {UNSUPPORTED}"),
    "rows by a mask": (lambda x, e: x[x > 3], f"cudaStreamSynchronize: {UNSUPPORTED}"),
    "event query": (lambda x, e: e.query(), f"cudaEventQuery: {UNSUPPORTED}"),
    "event wait of the host": (
        lambda x, e: e.synchronize(),
        f"cudaEventSynchronize: {UNSUPPORTED}",
    ),
    "query in another thread": (lambda x, e: _elsewhere(e), f"cudaEventQuery: {UNSUPPORTED}"),
    "event from outside": (
        lambda x, e: torch.cuda.current_stream().wait_event(e),
        "cudaStreamWaitEvent: cudaErrorStreamCaptureIsolation",
    ),
    "fork that joins nobody": (
        lambda x, e: _fork(x, joins=False),
        "cudaStreamEndCapture: cudaErrorStreamCaptureUnjoined",
    ),
    "another graph's capture": (
        lambda x, e: torch.cuda.CUDAGraph().capture_begin(),
        "cudaErrorIllegalState",
    ),
}


@pytest.mark.parametrize("name", MUST_FAIL)
def test_a_call_fails_while_capturing(name: str, outside: torch.cuda.Event) -> None:
    call, expected = MUST_FAIL[name]
    x, said = torch.arange(8.0).cuda(), ""
    try:
        captured(lambda: call(x, outside))
    except (RuntimeError, AssertionError) as error:
        said = str(error)
    assert expected in "\n".join([said, *device.refusals()])
    graph = captured(lambda: x.add_(1))  # the next capture is none the worse
    graph.replay()
    assert x.tolist() == [float(i + 1) for i in range(8)]


@pytest.mark.parametrize("name", ["fork and join", "allocation", "device to device"])
def test_a_call_is_allowed_while_capturing(name: str) -> None:
    x = torch.arange(8.0).cuda()
    calls = {
        "fork and join": lambda: _fork(x, joins=True),
        "allocation": lambda: torch.empty(100 << 20, dtype=torch.uint8, device="cuda"),
        "device to device": lambda: x.clone(),
    }
    captured(calls[name])
    assert device.refusals() == []


def test_thread_local_captures_let_other_threads_ask(outside: torch.cuda.Event) -> None:
    """The mode that the engine captures in."""
    x, graph = torch.arange(8.0).cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _elsewhere(outside)
        x.add_(1)
    graph.replay()
    assert x[0].item() == 1
    assert device.refusals() == []


def test_replays_compute_and_share_a_pool() -> None:
    pool, x, places = torch.cuda.graph_pool_handle(), torch.arange(8.0).cuda(), []
    y = torch.zeros(8, device="cuda")

    def step() -> None:
        scratch = x * 2
        places.append(scratch.data_ptr())
        y.copy_(scratch + 1)

    graphs = [captured(step, pool) for _ in range(3)]
    assert len(set(places)) == 1
    x.fill_(5)
    graphs[1].replay()
    assert y.tolist() == [11.0] * 8
    assert device.faults() == []


def test_freed_memory_of_a_pool_is_overwritten() -> None:
    """What a graph left in its pool is no value for the next one."""
    pool, x, kept = torch.cuda.graph_pool_handle(), torch.ones(8, device="cuda"), []
    first = captured(lambda: kept.append(x * 3), pool)
    first.replay()
    assert kept[0].tolist() == [3.0] * 8
    address = kept[0].data_ptr()
    weak = _weak(address)
    kept.clear()  # nobody holds it: the pool has it back
    second = captured(lambda: x.add_(0), pool)
    first.replay()
    assert weak.tolist() == [3.0] * 8
    second.replay()
    assert weak.isnan().all()


def _weak(address: int) -> Tensor:
    from compilespec.cudagraphs.drivers import _Memory

    return torch.as_tensor(_Memory(address, 32), device="cuda").view(torch.float32)


def test_a_read_after_a_free_is_seen() -> None:
    x = torch.ones(8, device="cuda")
    weak = _weak(x.data_ptr())
    del x
    assert (weak + 1).isnan().all()
    assert any("reads memory that was freed" in line for line in device.faults())


def test_memory_outside_the_pool_is_seen() -> None:
    """A graph that reads what its owner frees later."""
    held, y = [torch.ones(8, device="cuda")], torch.zeros(8, device="cuda")
    graph = captured(lambda: y.copy_(held[0]))
    graph.replay()
    assert device.faults() == []
    held.clear()
    graph.replay()
    assert device.faults() == [
        "outside the pool: a replayed graph touches memory that was freed since its capture"
    ]


def test_a_side_stream_that_joins_nobody_is_seen() -> None:
    x, y, side = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with device.lazy():
        with torch.cuda.stream(side):
            y.copy_(x)
        assert (y + 1).tolist() == [1.0] * 8  # the sum does not wait for the copy
    (fault,) = device.faults()
    assert re.fullmatch(
        r"no order: aten::add.Tensor on the default stream reads "
        r"what aten::copy_ on stream \d+ writes",
        fault,
    )


@pytest.mark.parametrize("waits", [True, False])
def test_order_between_streams_is_by_events(waits: bool) -> None:
    x, y, side = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y.copy_(x)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    y.add_(1)
    assert bool(device.faults()) is not waits


def test_memory_freed_while_another_stream_reads_is_seen() -> None:
    side = torch.cuda.Stream()
    for records in (True, False):
        x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            y.copy_(x)
        if records:
            x.record_stream(side)
        del x
        assert bool(device.faults()) is not records
        torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_staging_refilled_without_waiting_is_seen(waits: bool) -> None:
    staging, x = torch.ones(8).pin_memory(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    for value in (2.0, 3.0):
        staging.fill_(value)
        x.copy_(staging, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    expected = "staging: the host changed pinned memory that an asynchronous copy was reading"
    assert device.faults() == ([] if waits else [expected])


def test_a_result_that_nobody_waited_for_is_not_there() -> None:
    x, host = torch.ones(8, device="cuda"), torch.zeros(8).pin_memory()
    torch.cuda.synchronize()
    with device.lazy():
        host.copy_(x, non_blocking=True)
        assert host.tolist() == [0.0] * 8
        torch.cuda.synchronize()
        assert host.tolist() == [1.0] * 8


def test_a_missing_device_guard_is_seen() -> None:
    """Work on memory of cuda:1 belongs into a stream of cuda:1."""
    import triton
    import triton.language as tl

    @triton.jit
    def plus_one(x, n: tl.constexpr):
        at = tl.arange(0, n)
        tl.store(x + at, tl.load(x + at) + 1)

    x = torch.zeros(8, device="cuda:1")
    with torch.cuda.device(1):
        plus_one[(1,)](x, 8)
    assert device.faults() == []
    plus_one[(1,)](x, 8)
    assert "device guard: plus_one on cuda:0 with memory of cuda:1" in device.faults()


def test_a_cpu_tensor_is_no_argument_of_a_kernel() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def plus_two(x, n: tl.constexpr):
        at = tl.arange(0, n)
        tl.store(x + at, tl.load(x + at) + 2)

    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        plus_two[(1,)](torch.zeros(8), 8)
