"""Streams that Python's collector closes, wherever it happens to run: nobody else notices."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from compilespec.runtime import line, scheduler
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import FakeExecutor, engine_over, geometry, toy_decode
from tests.support.models import assert_nothing_held

VOCAB = 259
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def params(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


class Session:
    """Holds a stream in a reference cycle, with two running requests and six that wait."""

    def __init__(self, engine: Engine) -> None:
        self.me = self
        self.stream = engine.stream([[4, 5], list(range(80)), *[[6]] * 6], params(40))
        next(self.stream)


def serve_beside(engine: Engine, collect_soon: Callable[[], None]) -> None:
    """Abandon a session and serve another request; the collector runs in the midst of that."""
    Session(engine)
    collect_soon()
    (output,) = engine.generate([7, 8, 9], params(20))
    assert output.token_ids == toy_decode([7, 8, 9], 20, VOCAB)
    engine.step()  # after an abort that came with the very last call
    assert_nothing_held(engine)


@OVERLAP
@pytest.mark.parametrize("phase", ["prefill", "decode", "collect"])
def test_in_a_call_of_the_program(phase, overlap):
    hooks: dict[str, Callable[[], object]] = {}
    executor = FakeExecutor(
        geometry(max_batch_size=2), fail=lambda now: hooks.pop(now, lambda: None)()
    )
    serve_beside(engine_over(executor, overlap=overlap), lambda: hooks.update({phase: gc.collect}))
    assert not hooks


def test_while_another_request_is_queued(monkeypatch):
    real, hooks = line._rank, [gc.collect, lambda: None]

    def rank(request):
        if hooks:
            hooks.pop()()  # second: in the midst of the search for its place
        return real(request)

    engine = Engine(FakeExecutor(geometry(max_batch_size=2)))
    serve_beside(engine, lambda: monkeypatch.setattr(line, "_rank", rank))
    assert not hooks


@OVERLAP
def test_while_another_request_is_aborted(monkeypatch, overlap):
    engine = engine_over(FakeExecutor(geometry(max_batch_size=3)), overlap=overlap)
    gone = engine.submit([1, 2, 3], params(40))
    real = scheduler.now_ms

    def now_ms():
        monkeypatch.setattr(scheduler, "now_ms", real)
        gc.collect()
        return real()

    def abort() -> None:
        monkeypatch.setattr(scheduler, "now_ms", now_ms)
        engine.abort(gone)

    serve_beside(engine, abort)
    assert gone.finish_reason == "aborted"
