"""Faults planted in the engine itself: the fake device names each of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compilespec import SamplingParams
from compilespec.cudagraphs import staging
from compilespec.cudagraphs.drivers import CudaDriver
from compilespec.cudagraphs.recorder import GraphRecorder
from compilespec.runtime.engine import Engine
from tests.support.fake_cuda import PROMPTS, Case, compare
from tools.fake_cuda import device

pytestmark = pytest.mark.fake_cuda
BUCKETS = {"decode": [3], "prefill": [(3, 32)]}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    device.refusals(), device.faults()


def record(**options: Any) -> dict[str, Any]:
    case = Case(family="llama", is_lazy=True, options={"buckets": BUCKETS, **options})
    return compare(case, ask)


def ask(engine: Engine) -> list[list[int]]:
    """Requests of different lengths: what is staged for a step differs from the step before."""
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (3, 6, 11)]
    return [list(output.token_ids) for output in engine.generate(PROMPTS, params)]


def test_nothing_is_planted() -> None:
    assert record(overlap=True)["faults"] == []


def test_staging_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_NUM_STAGES", 1)
    monkeypatch.setattr(staging._Stage, "open", lambda self: self._host)
    faults = record(overlap=True)["faults"]
    assert any(line.startswith("staging: the host changed pinned memory") for line in faults)


def test_captures_on_a_stream_that_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def recording(self: CudaDriver) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    monkeypatch.setattr(CudaDriver, "recording", recording)
    faults = record()["faults"]
    assert any(line.startswith("no order: ") for line in faults)


def test_a_step_that_reads_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GraphRecorder._record_whole

    def reading(self: GraphRecorder, phase: Any, inputs: Any, outputs: Any) -> Any:
        def call(*given: Any) -> Any:
            made = phase.call(*given)
            made[0].sum().item()
            return made

        return whole(self, dataclasses.replace(phase, call=call), inputs, outputs)

    monkeypatch.setattr(GraphRecorder, "_record_whole", reading)
    faults = record()["faults"]
    assert any(line.startswith("dropped decode") for line in faults)
    assert "cudaStreamSynchronize: cudaErrorStreamCaptureUnsupported" in faults
    assert not any(", not [" in line for line in faults)  # tokens are right without a graph


def test_results_that_nobody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator between pieces makes lies outside the pool, and has to be kept."""

    def dropped(self: GraphRecorder, like: Any, *, is_brief: bool) -> Any:
        return self._driver.weak(torch.empty_like(like))

    monkeypatch.setattr(GraphRecorder, "_place_for", dropped)
    faults = record()["faults"]
    assert any(line.startswith(("use after free: ", "outside the pool: ")) for line in faults)
