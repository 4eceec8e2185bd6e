"""Recorder, dispatcher, staging and reads on the executable model of a GPU.

A toy step adds what the host wrote for a row to the row's sum and gives the sum out.  Whatever is
launched, written, captured and read in between, and however far the device lags behind, each launch
sees exactly what was written before it.  The faults show that the model would tell.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from compilespec.cudagraphs import staging
from compilespec.cudagraphs.dispatcher import Dispatcher, capture_all
from compilespec.cudagraphs.drivers import CudaDriver
from compilespec.cudagraphs.modes import GraphOptions
from compilespec.cudagraphs.recorder import GraphRecorder
from compilespec.lowering.stitching import OpStep, PieceStep, Stitched, StitchPlan
from compilespec.ops import _library
from compilespec.program import InputSpec, LoweredPhase, ProgramConfig, StepKey
from compilespec.runtime.host_writes import HostWrites
from compilespec.runtime.launched import Launched
from tests.support.gpu_model import Gpu, Kernel, Pace

R = 5  # rows; the one behind them is spare
WIDTH = 3  # numbers of a row that the host writes
PACES: tuple[Pace, ...] = ("at once", "when waited for", 1, 2, 3)
Action = tuple[Any, ...]  # ("launch", rows), ("write", row, start, numbers), or ("read",)


def first_piece(row_B: Tensor, sum_R: Tensor, added_RW: Tensor) -> tuple[Tensor, ...]:
    index_B = torch.where(row_B >= 0, row_B, R).long()
    return sum_R[index_B] + added_RW[index_B].sum(1).double(), index_B


def second_piece(square_B: Tensor, value_B: Tensor) -> tuple[Tensor, ...]:
    return (square_B - value_B * value_B + value_B,)


def last_piece(
    negative_B: Tensor, value_B: Tensor, index_B: Tensor, sum_R: Tensor, row_B: Tensor
) -> tuple[Tensor, ...]:
    new_B = torch.where(row_B >= 0, -negative_B, 0.0) + 0 * value_B
    sum_R.index_put_((index_B,), torch.where(row_B >= 0, new_B, sum_R[index_B]))
    return new_B.to(torch.int32).unsqueeze(1), torch.ones_like(row_B)


def whole(row_B: Tensor, sum_R: Tensor, added_RW: Tensor) -> tuple[Tensor, ...]:
    value_B, index_B = first_piece(row_B, sum_R, added_RW)
    (again_B,) = second_piece(value_B * value_B, value_B)
    return last_piece(-again_B, value_B, index_B, sum_R, row_B)


PLAN = StitchPlan(
    num_inputs=3,  # row_B, sum_R, added_RW
    steps=(
        PieceStep(piece="first", inputs=(0, 1, 2), outputs=(3, 4)),
        OpStep(target="aten.mul.Tensor", args=(("value", 3), ("value", 3)), output=5),
        PieceStep(piece="second", inputs=(5, 3), outputs=(6,)),
        OpStep(target="aten.neg.default", args=(("value", 6),), output=7),
        PieceStep(piece="last", inputs=(7, 3, 4, 1, 0), outputs=(8, 9)),
    ),
    outputs=(8, 9),
)


class World:
    """The toy on a modelled device: piecewise or whole graphs of 1, 2 and R rows."""

    def __init__(self, gpu: Gpu, kind: Any, *, waits: bool = False) -> None:
        self.gpu = gpu
        config = ProgramConfig(
            num_draft_tokens=0, max_batch_size=R, max_seq_len=8, max_prefill_tokens=8,
            block_size=4, num_blocks=8, vocab_size=7, dtype=torch.float64, device=gpu.device,
        )  # fmt: skip
        self.buffers = {
            "sum_R": torch.zeros(R + 1, dtype=torch.float64, device=gpu.device),
            "added_RW": torch.zeros((R + 1, WIDTH), dtype=torch.int32, device=gpu.device),
        }
        self.host = HostWrites(self.buffers, gpu.device)
        pieces = {"first": first_piece, "second": second_piece, "last": last_piece}
        stitched = Stitched(PLAN, {name: Kernel(gpu, call) for name, call in pieces.items()})
        call = stitched if kind == "piecewise" else Kernel(gpu, whole, waits=waits)
        kinds = {"row_B": "batch", "sum_R": "state", "added_RW": "state"}
        phase = LoweredPhase(
            key=StepKey("decode", 0), call=call, outputs=("emitted", "counts"), compile_ms=0.0,
            inputs=tuple(InputSpec(name=n, kind=k) for n, k in kinds.items()),  # type: ignore[arg-type]
            from_cache=False, stitched=stitched,
        )  # fmt: skip
        self.recorder = GraphRecorder(
            CudaDriver(gpu.device), GraphOptions(max_mib=1e9), mode="full"
        )
        self.call = Dispatcher(
            phase, self.buffers, config, buckets=[(1,), (2,), (R,)], kind=kind,
            recorder=self.recorder,
        )  # fmt: skip
        self.num_launches = 0
        self._in_flight: deque[Launched] = deque()

    def launch(self, rows: Sequence[int]) -> None:
        self.host.send()
        emitted, counts = self.call({"row_B": rows})
        self._in_flight.append(Launched(emitted, counts, len(rows)))
        self.num_launches += 1

    def run(self, actions: Sequence[Action]) -> list[list[int]]:
        """What each launch gave, read whenever the actions say so, and at the end."""
        given = []
        for action, *arguments in actions:
            if action == "launch":
                self.launch(*arguments)
            elif action == "write":
                row, start, numbers = arguments
                self.host.write("added_RW", row, numbers, start)
            elif self._in_flight:
                given.append(self._in_flight.popleft().read())
        given += [one.read() for one in self._in_flight]
        return [[token for (token,) in tokens] for tokens in given]


@contextlib.contextmanager
def world(pace: Pace, kind: str, **options: Any) -> Iterator[World]:
    gpu = Gpu(pace)
    with gpu.installed():
        yield World(gpu, kind, **options)


def right(actions: Sequence[Action]) -> list[list[int]]:
    """The same in plain Python: everything happens when it is asked for."""
    sums, added = [0] * R, [[0] * WIDTH for _ in range(R)]
    given = []
    for action, *arguments in actions:
        if action == "launch":
            for row in arguments[0]:
                sums[row] += sum(added[row])
            given.append([sums[row] for row in arguments[0]])
        elif action == "write":
            row, start, numbers = arguments
            added[row][start : start + len(numbers)] = numbers
    return given


@st.composite
def writes(draw: Any) -> Action:
    start = draw(st.integers(0, WIDTH - 1))
    numbers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=WIDTH - start))
    return "write", draw(st.integers(0, R - 1)), start, numbers


LAUNCHES = st.tuples(
    st.just("launch"), st.lists(st.integers(0, R - 1), min_size=1, max_size=R, unique=True)
)
ACTIONS = st.lists(st.one_of(LAUNCHES, writes(), st.just(("read",))), max_size=12)
KINDS = ("full", "piecewise", None)  # None: nothing is captured


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, kind=st.sampled_from(KINDS), pace=st.sampled_from(PACES) | st.integers(4))
def test_a_launch_sees_what_was_written_before_it_at_any_pace(
    actions: list[Action], kind: Any, pace: Pace
) -> None:
    with world(pace, kind) as one:
        assert one.run(actions) == right(actions)
        counts = one.gpu.counts
        assert not counts["pageable copy in"] + counts["pageable copy out"]
        assert one.host.num_copies <= one.num_launches


# A write and a launch after each other, buckets that take turns, and reads two launches late.
TRAFFIC: list[Action] = [
    action
    for step in range(6)
    for action in (
        ("write", step % R, 0, [step, 2 * step, 1]),
        ("write", (step + 1) % R, 1, [7 - step]),
        ("launch", list(range(R))[: (1, 5, 2)[step % 3]]),
        *([("read",)] if step > 1 else []),
    )
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("pace", PACES, ids=str)
def test_traffic(pace: Pace, kind: Any) -> None:
    with world(pace, kind) as one:
        capture_all([one.call], startup_seconds=0 if pace == 1 else 600)
        assert one.run(TRAFFIC) == right(TRAFFIC)
        report = one.recorder.report
        assert len(report.captured) == (3 if kind else 0)
        assert bool(report.num_replays) == bool(kind)


# --- faults: what is done without, and the model tells ---


def copies_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay may begin before its batch has landed."""
    send = staging._Stage.send

    def elsewhere(stage: Any, count: int | None) -> None:
        with torch.cuda.stream(torch.cuda.Stream(stage._target.device)):
            send(stage, count)

    monkeypatch.setattr(staging._Stage, "send", elsewhere)


def stages_are_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is overwritten while a copy is in flight."""
    monkeypatch.setattr(staging._Stage, "open", lambda stage: stage._host)


def events_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is cuda:0, where nothing runs: they say at once that all is done."""
    record = torch.cuda.Event.record
    monkeypatch.setattr(torch.cuda.Event, "record", lambda event, stream=None: record(event))


def tokens_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)


def outputs_are_copied_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay has overwritten them by then."""

    class Late:
        def __init__(self, emitted: Tensor, counts: Tensor, num_rows: int) -> None:
            self._emitted = emitted[:num_rows]

        def read(self) -> list[list[int]]:
            return self._emitted.tolist()

    monkeypatch.setitem(globals(), "Launched", Late)


def values_are_not_kept_for_later_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one graph leaves for another is overwritten by a third."""
    capture = CudaDriver.capture

    def forgetting(driver: CudaDriver, call: Any) -> Any:
        graph, made = capture(driver, call)
        return graph, [driver.weak(one) for one in made]

    monkeypatch.setattr(CudaDriver, "capture", forgetting)


def captures_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call before a capture runs beside what was launched before it."""

    @contextlib.contextmanager
    def recording(driver: Any) -> Iterator[None]:
        with torch.cuda.stream(driver._stream):
            yield

    monkeypatch.setattr(CudaDriver, "recording", recording)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    copies_on_a_stream_of_their_own: "full",
    stages_are_filled_at_once: "full",
    events_on_the_current_device: "full",
    tokens_are_read_at_once: "full",
    outputs_are_copied_when_they_are_read: "full",
    values_are_not_kept_for_later_pieces: "piecewise",
    captures_do_not_wait: "full",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_gives_wrong_tokens_at_some_pace(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_told(pace: Pace) -> bool:
        with world(pace, FAULTS[fault]) as one, monkeypatch.context() as patch:
            fault(patch)
            try:
                return one.run(TRAFFIC) != right(TRAFFIC)
            except IndexError:  # a place that never arrived
                return True

    assert any(map(is_told, ("when waited for", 1, 2, 3))), "the model does not tell"


@pytest.mark.parametrize("pace", PACES, ids=str)
def test_a_write_of_its_own_waits_for_the_step_in_flight(pace: Pace) -> None:
    """What writing a buffer by `buffer[row] = tensor` costs: right tokens, and a wait each."""
    with world(pace, "full") as one:
        one.launch([0, 1])
        one.buffers["added_RW"][0, :2] = torch.tensor([3, 4], dtype=torch.int32)
        assert one.gpu.counts["pageable copy in"] == 1
        assert one.run([("launch", [0])]) == [[0, 0], [7]]


# --- what cannot be captured, and where kernels are launched ---


def test_a_call_that_waits_falls_back_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knew: the first capture fails, and no other of the step is tried; the tokens are
    right.
    """
    with world(1, "full", waits=True) as one, caplog.at_level(logging.WARNING, "compilespec"):
        assert one.run(TRAFFIC) == right(TRAFFIC)
        report = one.recorder.report.as_dict()
    assert not report["graphs"]
    first, *others = report["dropped"].values()
    assert first.startswith("it cannot be captured (CUDA error: operation not permitted")
    assert set(others) == {"capturing decode, K=0: 1 (full) failed"}
    assert "no graph for decode, K=0: 1 (full): it cannot be captured" in caplog.text


def test_a_step_whose_capture_failed_leaves_other_steps_their_graphs() -> None:
    with world(1, "full", waits=True) as one:
        sound = World(one.gpu, "full")
        key = StepKey("decode", 0, "greedy")
        other = Dispatcher(
            replace(sound.call._phase, key=key), sound.buffers, sound.call._config,
            buckets=[(1,), (2,), (R,)], kind="full", recorder=one.recorder,
        )  # fmt: skip
        sound.call = other
        assert one.run(TRAFFIC) == right(TRAFFIC) == sound.run(TRAFFIC)
        report = one.recorder.report
    assert {record.key.step for record in report.captured} == {key}
    assert {dropped.step for dropped in report.dropped} == {one.call.key}


def test_memory_of_graphs_is_what_their_captures_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what earlier work left in the allocator's cache, which is given back on the way."""
    mib = 2**20
    with world("at once", "full") as one:
        memory = {"cached": 500 * mib, "graphs": 0}
        capture = CudaDriver.capture

        def captured(driver: CudaDriver, call: Any) -> Any:
            memory["graphs"] += 3 * mib
            return capture(driver, call)

        monkeypatch.setattr(CudaDriver, "capture", captured)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: memory.update(cached=0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: sum(memory.values()))
        capture_all([one.call], startup_seconds=600)
        assert [record.mib for record in one.recorder.report.captured] == [3.0] * 3


def test_capturing_many_buckets_waits_and_collects_once() -> None:
    with world("at once", "full") as one, mock.patch("gc.collect") as collect:
        capture_all([one.call], startup_seconds=600)
        assert len(one.recorder.report.captured) == 3
        assert one.gpu.counts["synchronised"] == 1
    assert collect.call_count == 1
    assert gc.isenabled()


def test_captures_have_a_stream_of_their_own() -> None:
    """A library's workspace is made by stream: that of a first call is nobody's, and may be
    cleared, while that of a capture belongs to the graphs' pool.
    """
    with world("at once", "full") as one:
        streams = []

        def noted(*inputs: Tensor) -> Any:
            streams.append(one.gpu.current_stream(one.gpu.device))
            return Kernel(one.gpu, whole)(*inputs)

        one.call._phase = replace(one.call._phase, call=noted)
        one.call.capture((2,))
        usual = one.gpu.streams[one.gpu.device]
        assert [stream is usual for stream in streams] == [True, False]


def test_pinned_memory_belongs_to_the_engines_device() -> None:
    """Elsewhere it would open a context on a device that the engine does not use."""
    with world("at once", "full") as one:
        assert one.run(TRAFFIC) == right(TRAFFIC)
        assert one.gpu.current_device != one.gpu.device
        assert one.gpu.counts["pinned elsewhere"] == 0


def test_a_phase_that_is_known_to_wait_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    with world(1, "full") as one, caplog.at_level(logging.WARNING, "compilespec"):
        phase = replace(one.call._phase, waits_for_host="an operator: and why")
        one.call = Dispatcher(
            phase, one.buffers, one.call._config, buckets=[(R,)], kind="full",
            recorder=one.recorder,
        )  # fmt: skip
        assert one.run(TRAFFIC) == right(TRAFFIC)
        assert one.call.keys == []
        report = one.recorder.report.as_dict()
    assert report["refused"] == {"decode, K=0": "an operator: and why"}
    assert not report["dropped"]
    assert "the host waits in its middle (an operator: and why)" in caplog.text


def test_triton_launches_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "has_triton", lambda: False)
    gpu = Gpu("at once", "cuda:1")
    with gpu.installed():
        run = _library._lazy_triton("twice", "twice", lambda x: gpu.current_device)
        assert run(torch.zeros(2, device="cuda:1")) == torch.device("cuda:1")
        assert gpu.current_device == run(torch.zeros(2)) == torch.device("cuda:0")
