"""Whole programs replayed in the emulation: every mode and bucket gives the uncaptured tokens.

Padding, expired values and outputs of earlier calls are poisoned, so that whoever reads them shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import compilespec
from compilespec import SamplingParams, lowering
from compilespec.cudagraphs.drivers import poison
from compilespec.cudagraphs.modes import MODES
from compilespec.errors import PassError, StaleGraphInput
from compilespec.runtime.executor import PrefillChunk
from compilespec.runtime.step_runner import StepRunner
from tests.support.graph_site import BUCKETS, MAX_SEQ_LEN, Site, the_site
from tests.support.models import run_traffic, tiny_target

CAPTURED = [mode for mode in MODES if mode != "none"]


@pytest.fixture(scope="module")
def site() -> Site:
    return the_site()


@pytest.mark.parametrize("startup_seconds", [0.0, 60.0], ids=["lazy", "at_start"])
@pytest.mark.parametrize("mode", CAPTURED)
def test_every_mode_gives_the_models_own_tokens(
    site: Site, mode: str, startup_seconds: float
) -> None:
    """Batches of 1 to 5 rows and prefills of every bucket edge, joining and leaving."""
    runner, engine = site.engine(mode, startup_seconds=startup_seconds)
    with engine:
        runner.capture()
        at_start = runner.graph_report()
        assert at_start is not None
        assert bool(at_start["graphs"]) == bool(startup_seconds)
        asks = [*site.asks, *site.asks[::-1]]
        requests = run_traffic(engine, asks, [1, 1, 2, 3, 5, 4, 2, 5])
        for request, ask in zip(requests, asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        assert engine.stats().num_recompiles == 0
        report = runner.graph_report()
        assert report is not None
        assert report["num_uncaptured"] == 0
        assert report["num_replays"] > 20
        assert not report["dropped"]
        kinds = {(graph["phase"], graph["kind"]) for graph in report["graphs"]}
        assert kinds == set(MODES[mode].items())
        if startup_seconds:
            assert len(report["graphs"]) == len(at_start["graphs"])
            assert len(report["graphs"]) == 3 * len(MODES[mode])


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_full_decode_is_one_graph_and_one_replay_a_step(site: Site, rows: int) -> None:
    runner = site.runner("full")
    runner.capture()
    report = runner.graph_report()
    assert report is not None
    assert all(graph["num_graphs"] == 1 for graph in report["graphs"])
    begin(runner, rows)
    recordings = runner.calls["decode"]._recordings
    for _ in range(3):
        runner.decode(list(range(rows)))
    bucket = next(size for size in (1, 2, 5) if size >= rows)
    assert {b: r.num_replays for b, r in recordings.items()} == {
        (size,): 3 * (size == bucket) for size in (1, 2, 5)
    }
    runner.close()


def test_pieces_are_a_graph_each_with_attention_between(site: Site) -> None:
    runner = site.runner("piecewise")
    runner.capture()
    report = runner.graph_report()
    assert report is not None
    num_attention = 3 + 2  # target layers, and a drafter layer in each of two passes
    assert {graph["num_graphs"] for graph in report["graphs"]} == {num_attention + 1}
    runner.close()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "refused"])
def test_grouped_experts_in_graphs(
    is_cut: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layers' experts share an arange, of two numbers a token, that can cross no cut.  What
    cannot be cut at all is captured whole, and says so.
    """

    def refuse(gm: fx.GraphModule) -> Any:
        raise PassError("mm has a size that is an expression")

    if not is_cut:
        monkeypatch.setattr(lowering, "split_at_attention", refuse)
    model = tiny_target("qwen3_moe", torch.bfloat16, experts="grouped_mm", num_layers=2)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    texts = []
    for mode in ("none", "full_and_piecewise"):
        with compilespec.compile(
            model, "none", backend="eager", cudagraphs=mode, max_batch_size=1, max_seq_len=32,
            max_prefill_tokens=16, buckets={"prefill": [(1, 16)]},
        ) as engine:  # fmt: skip
            texts.append(engine.generate([[5, 6, 7, 8, 9, 11]], params)[0].token_ids)
            report = engine.plan().get("cudagraphs")
    assert texts[0] == texts[1]
    kinds = {graph["phase"]: (graph["kind"], graph["num_graphs"]) for graph in report["graphs"]}
    assert kinds["decode"] == ("full", 1)
    assert kinds["prefill"] == (("piecewise", 3) if is_cut else ("full", 1))
    assert ("prefill is lowered as a whole: mm has a size" in caplog.text) is not is_cut
    assert ("prefill is not in pieces" in caplog.text) is not is_cut


def test_capturing_and_padded_batches_change_no_state(site: Site) -> None:
    """Every bucket of both phases, with padded rows only: all buffers keep their bits."""
    runner = site.runner("full_and_piecewise")
    begin(runner, 3)
    spare = site.program.config.max_batch_size
    before = {name: buffer.clone() for name, buffer in runner.buffers.items()}
    runner.capture()
    for (size,) in BUCKETS.decode:
        runner.calls["decode"]({"row_B": [-1] * size})
    for requests, tokens in BUCKETS.prefill:
        runner.calls["prefill"](padded_prefill(requests, tokens))
    for name, buffer in runner.buffers.items():
        live = slice(None) if name.startswith("cache.") else slice(spare)
        assert torch.equal(buffer[live], before[name][live]), name
    runner.close()


def padded_prefill(requests: int, tokens: int) -> dict[str, list[int]]:
    """Harmful but legal values: only the rows say that nobody is there."""
    names = {"ids_T": 7, "next_T": 9, "position_T": MAX_SEQ_LEN - 1, "row_T": -1, "owner_T": 0}
    batch = {name: [value] * tokens for name, value in names.items()}
    return {**batch, "last_R": [tokens - 1] * requests, "commit_row_R": [-1] * requests}


def test_without_its_bucket_a_batch_runs_unpadded(site: Site) -> None:
    """E4: what is larger than every bucket runs at its own size; the tokens are the same."""
    runner, engine = site.engine("full_and_piecewise")
    for call in runner.calls.values():
        call._is_dropped.add(call.buckets[-1])
    with engine:
        asks = site.asks[:5]
        requests = run_traffic(engine, asks, [5])
        for request, ask in zip(requests, asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        report = runner.graph_report()
        assert report is not None
        assert report["num_uncaptured"] > 0


def test_sampled_requests_draw_the_same_tokens_in_every_bucket(site: Site) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=0.9, seed=5, ignore_eos=True)
    prompts = [list(ask.prompt) for ask in site.asks[:5]]
    texts = []
    for mode in ("none", "full_and_piecewise"):
        _, engine = site.engine(mode)
        with engine:
            texts.append([output.token_ids for output in engine.generate(prompts, params)])
            texts.append([engine.generate([p], params)[0].token_ids for p in prompts])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len({tuple(tokens) for tokens in texts[0]}) > 1


def test_a_state_buffer_that_was_replaced_is_refused(site: Site) -> None:
    runner = site.runner("full")
    begin(runner, 1)
    runner.decode([0])
    call = runner.calls["decode"]
    index = next(i for i, spec in enumerate(call._phase.inputs) if spec.name == "seq_len_R")
    bound = call._bound[1,]
    bound[index] = bound[index].clone()
    with pytest.raises(StaleGraphInput, match="input seq_len_R is not the one"):
        runner.decode([0])
    runner.close()


def test_after_a_replay_nothing_that_crossed_a_cut_is_left(site: Site) -> None:
    """The check of the check: values expire, so the right tokens above prove the lifetimes."""
    runner = site.runner("piecewise")
    begin(runner, 1)
    call = runner.calls["decode"]
    recording = call.capture((1,))
    assert recording is not None
    graphs = [step.__self__ for step in recording._steps if hasattr(step, "__self__")]
    assert len(graphs) == recording.num_graphs
    runner.decode([0])
    plan = call._phase.stitched.plan
    for step, graph in zip(plan.piece_steps, graphs, strict=True):
        for number, made in zip(step.outputs, graph._made, strict=True):
            gone = torch.empty_like(made)
            poison(gone)
            is_gone = torch.allclose(made, gone, rtol=0, atol=0, equal_nan=True)
            assert is_gone != (number in plan.outputs)
    runner.close()


def begin(runner: StepRunner, rows: int) -> None:
    """Prompts in the first rows, with separate blocks."""
    count = runner.geometry.config.blocks_per_row
    chunks = []
    for row in range(rows):
        runner.set_blocks(row, list(range(row * count, (row + 1) * count)))
        chunks.append(PrefillChunk(row=row, start=0, tokens=(5, 6 + row), next_token=None))
    runner.prefill(chunks)
