"""Engines on the fake device beyond plain traffic: threads, devices, adapters, guides, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compilespec import SamplingParams
from compilespec.cudagraphs.modes import GraphOptions
from compilespec.cudagraphs.recorder import GraphRecorder
from compilespec.runtime.engine import Engine
from compilespec.runtime.engine_thread import EngineThread
from compilespec.runtime.executor import PrefillChunk
from tests.support.adapters import write_adapter
from tests.support.fake_cuda import GREEDY, PROMPTS, Case, compare, engine_on, model_of
from tools.fake_cuda import device

pytestmark = pytest.mark.fake_cuda


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    device.refusals(), device.faults()
    yield
    assert device.faults() == []


def through_a_thread(engine: Engine) -> list[list[int]]:
    """All prompts at once, twice, asked of the engine's thread."""
    thread = EngineThread(engine)
    try:
        tickets = [thread.submit(prompt, GREEDY) for prompt in 2 * PROMPTS]
        return [list(ticket.result().token_ids) for ticket in tickets]
    finally:
        thread.close()


@pytest.mark.parametrize("is_lazy", [False, True], ids=["early", "late"])
def test_an_engine_thread_captures_while_serving(is_lazy: bool) -> None:
    """Nothing is captured at start; launches overlap; others use the device meanwhile."""
    options = {"overlap": True, "cudagraphs": GraphOptions(startup_seconds=0)}
    case = Case(family="llama", spec="eagle3", is_lazy=is_lazy, options=options)
    record = compare(case, through_a_thread)
    assert record["faults"] == []
    assert record["buckets"] > 2
    assert record["kinds"] == ["decode full", "prefill piecewise"]


def test_two_engines_on_two_devices() -> None:
    """Each has its memory and its pinned memory on its device."""
    case = Case(family="llama", spec="ngram")
    with engine_on("cpu", case) as engine:
        wanted = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(engine_on(f"cuda:{i}", case)) for i in range(2)]
        reserved = [torch.cuda.memory_reserved(i) for i in range(2)]
        for engine in engines[::-1]:
            assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == wanted
        assert [torch.cuda.memory_reserved(i) for i in range(2)] == reserved
    assert device.refusals() == []


def test_an_engine_on_the_second_device_leaves_the_first_alone() -> None:
    """Its memory, pinned memory included, is asked for on cuda:1 alone."""
    before = set(_asked_on(0))
    with engine_on("cuda:1", Case(family="llama", spec="eagle3")) as engine:
        engine.generate(PROMPTS, GREEDY)
    assert set(_asked_on(0)) == before


def _asked_on(index: int) -> list[str]:
    return [line for line in device.allocations() if line.endswith(f"on {index}")]


def test_a_decode_step_is_one_replay_and_waits_for_nothing() -> None:
    with engine_on("cuda", Case(family="llama", spec="eagle3")) as engine:
        runner: Any = engine._executor
        runner.set_blocks(0, list(range(runner.geometry.config.blocks_per_row)))
        runner.prefill([PrefillChunk(row=0, start=0, tokens=(5, 6, 7), next_token=None)])
        runner.decode([0])
        torch.cuda.synchronize()
        launches, replays = device.num_launches(), device.num_replays()
        with device.lazy():
            handles = [runner.launch_decode([0]) for _ in range(2)]
            assert device.num_pending() > 2  # nothing has run yet
            assert device.num_replays() - replays == 2
            assert device.num_launches() == launches
            assert all(runner.collect(handle)[0] for handle in handles)


def test_adapters(tmp_path: Path) -> None:
    model, names = model_of("llama"), ("a", "b")
    made = {name: write_adapter(tmp_path / name, model, seed=ord(name)) for name in names}
    wanted = [
        SamplingParams(max_new_tokens=6, ignore_eos=True, adapter=name) for name in (None, *names)
    ]

    def ask(engine: Engine) -> list[list[int]]:
        return [list(output.token_ids) for output in engine.generate(PROMPTS, wanted)]

    record = compare(Case(family="llama", spec="eagle3", options={"adapters": made}), ask)
    assert record["faults"] == []
    assert record["replays"] > 5


def test_guides() -> None:
    options = [[10, 11, 12, 13], [10, 11, 20], [31, 96, 64, 63, 32]]
    guided = [
        SamplingParams(guide=options, max_new_tokens=9),
        SamplingParams(max_new_tokens=6, ignore_eos=True),
        SamplingParams(guide=options, max_new_tokens=9, temperature=1.0, seed=3),
    ]

    def ask(engine: Engine) -> list[list[int]]:
        made = [list(output.token_ids) for output in engine.generate(PROMPTS, guided)]
        assert all(made[i][:-1] in options for i in (0, 2))
        return made

    record = compare(Case(family="llama", spec="eagle3"), ask)
    assert record["faults"] == []


def test_memory_ends_in_the_middle_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is left out by name; all others are captured, and tokens are the CPU's."""
    record_one, count = GraphRecorder._record, [0]

    def starved(self: GraphRecorder, *args: Any) -> Any:
        count[0] += 1
        with device.memory_of(0) if count[0] == 1 else contextlib.nullcontext():
            return record_one(self, *args)

    monkeypatch.setattr(GraphRecorder, "_record", starved)
    record = compare(Case(family="llama", spec="eagle3"))
    (fault,) = record["faults"]
    assert "dropped" in fault
    assert "out of memory" in fault
    assert record["buckets"] == count[0] - 1
    assert record["replays"] > 20
