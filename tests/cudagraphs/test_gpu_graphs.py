"""On a GPU: replayed steps give the tokens of interpreted ones, one launch a step, no host sync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.methods.eagle3 import random_head
from compilespec.runtime import step_runner
from compilespec.runtime.engine import Engine
from compilespec.runtime.executor import PrefillChunk
from tests.support.models import VOCAB, target_info, tiny_target

pytestmark = pytest.mark.gpu

MAX_SEQ_LEN = 96
SIZES = {"max_batch_size": 5, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 64}
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[3 + (7 * row + 5 * i) % (VOCAB - 3) for i in range(1 + 9 * row)] for row in range(5)]


def build(**options: Any) -> Engine:
    model = tiny_target("llama", torch.float32, num_layers=3).cuda()
    head = random_head(target_info(model, MAX_SEQ_LEN), aux_layers=(0, 1, 2))
    return compilespec.compile(
        model, "eagle3", draft=head, num_draft_tokens=3, **{**SIZES, **options}
    )


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The same rewritten graphs, interpreted, without graphs."""
    with build(backend="eager", cudagraphs="none") as engine:
        return [list(output.token_ids) for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with build() as engine:
        yield engine


def test_auto_captures_full_decode_and_prefill_in_pieces(engine: Engine) -> None:
    report = engine.plan()["cudagraphs"]
    assert report["mode"] == "full_and_piecewise"
    assert report["driver"] == "cuda"
    kinds = {(graph["phase"], graph["kind"]) for graph in report["graphs"]}
    assert kinds == {("decode", "full"), ("prefill", "piecewise")}
    assert not report["dropped"]
    assert all(g["num_graphs"] == 1 for g in report["graphs"] if g["kind"] == "full")


def test_replayed_tokens_are_the_interpreted_ones(
    engine: Engine, expected: list[list[int]]
) -> None:
    for count in (1, 2, 5):
        outputs = engine.generate(PROMPTS[:count], PARAMS)
        assert [list(output.token_ids) for output in outputs] == expected[:count]
    stats, report = engine.stats(), engine.plan()["cudagraphs"]
    assert stats.num_recompiles == 0
    assert report["num_uncaptured"] == 0
    assert report["num_replays"] > 0


@pytest.mark.parametrize("mode", ["full", "full_decode_only", "piecewise", "none"])
def test_every_mode_gives_the_same_tokens(mode: str, expected: list[list[int]]) -> None:
    with build(cudagraphs=mode) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [list(output.token_ids) for output in outputs] == expected


def begin(engine: Engine) -> Any:
    runner: Any = engine._executor
    runner.set_blocks(0, list(range(runner.geometry.config.blocks_per_row)))
    runner.prefill([PrefillChunk(row=0, start=0, tokens=(5, 6, 7), next_token=None)])
    runner.decode([0])
    return runner


def test_a_decode_step_is_one_replay(engine: Engine) -> None:
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        pytest.skip("needs CUPTI")
    runner = begin(engine)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        handle = runner.launch_decode([0])
        torch.cuda.synchronize()
    runner.collect(handle)
    counts = {event.key: event.count for event in trace.key_averages()}
    assert counts.get("cudaGraphLaunch") == 1
    assert counts.get("cudaLaunchKernel", 0) == 0
    assert counts.get("cuLaunchKernel", 0) == 0


def test_launching_a_step_does_not_wait_for_the_device(engine: Engine) -> None:
    runner = begin(engine)
    torch.cuda.set_sync_debug_mode("error")
    try:
        handles = [runner.launch_decode([0]) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(runner.collect(handle)[0] for handle in handles)


def test_capturing_compiles_no_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compile them before, and what they compile is what is launched."""
    from triton import knobs
    from triton.runtime import jit

    compiled: dict[str, list[str]] = {"before": [], "capturing": []}
    when, capture_all = ["before"], step_runner.capture_all

    def capture(*given: Any, **options: Any) -> None:
        when[0] = "capturing"
        capture_all(*given, **options)

    def note(*, fn: Any, **about: Any) -> None:
        if fn.module.startswith("compilespec."):
            compiled[when[0]].append(fn.name)

    monkeypatch.setattr(step_runner, "capture_all", capture)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    for kernel in jit._triton_jit_function_registry.values():
        kernel.device_caches.clear()  # as in a new process
    with build(backend="eager") as engine:
        assert engine.plan()["cudagraphs"]["graphs"]
    names = {name.rpartition(".")[2] for name in compiled["before"]}
    assert {"attend_kernel", "write_kernel"} <= names
    assert compiled["capturing"] == []
