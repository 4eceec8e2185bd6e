"""Whole engines on the executable model of a GPU: right tokens however far the device lags behind.

Real scheduler, runner, graphs and copies; steps are launched before the last one's tokens are read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.runtime.host_writes import HostWrites
from tests.support.gpu_engine import compiling_for
from tests.support.gpu_model import Gpu, Pace
from tests.support.graph_site import Site, the_site
from tests.support.models import run_traffic, tiny_target


@pytest.fixture(scope="module")
def site() -> Site:
    return the_site()


def serve(site: Site, mode: str, pace: Pace, *, startup_seconds: float = 600.0) -> Any:
    """Tokens of traffic that joins and leaves, what the model counted, and the engine's stats."""
    gpu = Gpu(pace)
    with gpu.installed():
        options = {"overlap": True, "startup_seconds": startup_seconds}
        runner, engine = site.engine(mode, gpu=gpu, **options)
        with engine:
            runner.capture()
            requests = run_traffic(engine, site.asks, [1, 3, 5])
            return [r.output_token_ids for r in requests], gpu.counts, engine.stats()


@pytest.mark.parametrize("pace", ["when waited for", 1], ids=str)
@pytest.mark.parametrize("mode", ["full_and_piecewise", "none"])
def test_the_models_own_tokens_and_no_wait_for_a_write(site: Site, mode: str, pace: Pace) -> None:
    """At most one copy of what the host wrote a launch, none through pageable memory."""
    tokens, counts, stats = serve(site, mode, pace)
    assert tokens == [list(ask.tokens) for ask in site.asks]
    assert counts["pageable copy in"] == counts["pageable copy out"] == 0
    num_launches = stats.num_prefills + sum(stats.num_decodes_by_bucket.values())
    assert 0 < stats.num_state_copies <= num_launches
    # a batch, and what the host wrote, each by one copy; and batches of padding to capture
    num_captures = 6 if mode != "none" else 0
    assert counts["pinned copy in"] == num_launches + stats.num_state_copies + num_captures


@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("mode", ["full", "full_decode_only", "piecewise"])
def test_every_mode_at_many_paces(site: Site, mode: str, seed: int) -> None:
    tokens, counts, _ = serve(site, mode, seed, startup_seconds=600.0 * (seed % 2))
    assert tokens == [list(ask.tokens) for ask in site.asks]
    assert counts["pageable copy in"] == counts["pageable copy out"] == 0


def test_writes_through_pageable_memory_are_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a write a row at a time from what `torch.tensor` made, as a wait each."""

    def write(host: HostWrites, name: str, row: int, values: Any, start: int = 0) -> None:
        buffer = host.buffers[name]
        flat = torch.as_tensor(values).reshape(-1).to(buffer.dtype)
        buffer[row].view(-1)[start : start + len(flat)] = flat

    monkeypatch.setattr(HostWrites, "write", write)
    tokens, counts, _ = serve(site, "none", "when waited for")
    assert tokens == [list(ask.tokens) for ask in site.asks]
    assert counts["pageable copy in"] > 20


def test_a_step_with_processors_on_the_host_is_not_captured() -> None:
    """And says so; sampled, biased and penalised rows beside them are written in the same copy."""
    prompts = [[5, 6, 7], [9, 8], [3, 4, 5, 6, 7, 8, 9, 10]]
    params = [
        SamplingParams(max_new_tokens=5, logits_processor=lambda ids, logits: logits.roll(1)),
        SamplingParams(max_new_tokens=5, temperature=0.8, seed=3, logit_bias={5: 2.0}),
        SamplingParams(max_new_tokens=5, repetition_penalty=1.4),
    ]

    def outputs(**options: Any) -> Any:
        model = tiny_target("llama", num_layers=1)
        with compilespec.compile(
            model, backend="eager", max_batch_size=3, max_seq_len=32, host_processors=True,
            **options,
        ) as engine:  # fmt: skip
            given = [output.token_ids for output in engine.generate(prompts, params)]
            return given, engine.plan().get("cudagraphs")

    want, _ = outputs()
    gpu = Gpu("when waited for")
    with compiling_for(gpu):
        got, report = outputs(cudagraphs="full", overlap=True)
    assert got == want
    assert not report["graphs"]
    assert set(report["refused"]) == {"prefill", "decode, K=0"}
    for why in report["refused"].values():
        assert why.startswith("compilespec.host_process.default: requests' logits processors")
    assert gpu.counts["pageable copy in"] == 0
