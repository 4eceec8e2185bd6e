"""Ctrl-C at any place: nothing is lost, and nothing but KeyboardInterrupt comes out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest

from compilespec.runtime import (
    blocks,
    chunks,
    delivery,
    engine,
    holdings,
    launches,
    line,
    prefix_cache,
    scheduler,
)
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import FakeExecutor, engine_over, geometry, toy_decode
from tests.support.models import assert_nothing_held

VOCAB = 259
PARTS = (engine, scheduler, line, holdings, blocks, prefix_cache, chunks, launches, delivery)
FILES = {module.__file__ for module in PARTS}
SHARED = list(range(1, 10))  # a block that is found again
PROMPTS = [SHARED, [5], [*SHARED, 6, 7], [8] * 20, [9, 9]]
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)

Place = tuple[CodeType, int]  # of a function; its line or instruction


@contextmanager
def before_every(event: str, see: Callable[[Place], None]) -> Iterator[None]:
    """Call `see` before every "line" or "opcode" of the files runs."""

    def trace(frame: FrameType, now: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = event == "opcode"
        if now == event:
            see((frame.f_code, frame.f_lasti if event == "opcode" else frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def make_engine(overlap: bool, fail: Callable[[str], None] = lambda phase: None) -> Engine:
    """So few blocks that requests make room for others."""
    sizes = geometry(num_blocks=8, max_batch_size=3, max_seq_len=64)
    executor = FakeExecutor(sizes, lookahead=1, fail=fail)
    return engine_over(executor, overlap=overlap, lookahead=1)


def run(engine: Engine, see: Callable[[Place], None], event: str = "line") -> None:
    with before_every(event, see):
        engine.generate(PROMPTS, PARAMS)


def assert_serves(engine: Engine) -> None:
    engine._executor._in_flight.clear()  # what was launched is lost
    outputs = engine.generate(PROMPTS, PARAMS)
    while engine.has_work:  # nobody aborted them any more
        engine.step()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == toy_decode(prompt, 20, VOCAB)
    assert_nothing_held(engine)


def places(overlap: bool, event: str = "line") -> list[Place]:
    """All that a run comes to."""
    engine, seen = make_engine(overlap), dict[Place, None]()
    run(engine, lambda place: seen.update({place: None}), event)
    assert engine.stats().num_preemptions
    assert engine.stats().num_cached_tokens
    return list(seen)


OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


@OVERLAP
@pytest.mark.parametrize("event", ["line", pytest.param("opcode", marks=pytest.mark.slow)])
def test_an_interrupt_anywhere_loses_nothing(overlap, event):
    every = places(overlap, event)
    assert len(every) > 200
    for place in every:

        def interrupt(current: Place, place: Place = place) -> None:
            if current == place:
                raise KeyboardInterrupt  # which ends the tracing, too

        engine = make_engine(overlap)
        with pytest.raises(KeyboardInterrupt):
            run(engine, interrupt, event)
        engine._executor._in_flight.clear()
        assert_nothing_held(engine)
        assert_serves(engine)


class Twice:
    """An interrupt in the third call of a phase, and another some lines later."""

    def __init__(self, phase: str, num_more: int) -> None:
        self.phase, self.num_more = phase, num_more
        self.num_calls = self.num_lines = 0
        self.num_raised = 0

    def in_call(self, phase: str) -> None:
        self.num_calls += phase == self.phase
        if self.num_calls == 3 and not self.num_raised:
            self.num_raised = 1
            raise KeyboardInterrupt

    def at_line(self, place: Place) -> None:
        self.num_lines += self.num_raised
        if self.num_raised == 1 and self.num_lines > self.num_more:
            self.num_raised = 2
            raise KeyboardInterrupt


@OVERLAP
@pytest.mark.parametrize("phase", ["prefill", "decode", "collect"])
def test_an_interrupted_clean_up_is_finished_by_the_next_call(overlap, phase):
    for num_more in range(1000):
        interrupts = Twice(phase, num_more)
        engine = make_engine(overlap, interrupts.in_call)
        with pytest.raises(KeyboardInterrupt):
            run(engine, interrupts.at_line)
        assert interrupts.num_raised
        assert_serves(engine)
        if interrupts.num_raised == 1:
            break
    assert num_more > 50
