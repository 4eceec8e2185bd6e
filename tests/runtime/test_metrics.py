"""What an engine says about itself: counters for Prometheus, moments of each request."""

from __future__ import annotations

import logging
import sys

import pytest

from compilespec import SamplingParams, metrics
from compilespec.errors import MissingDependency
from compilespec.runtime.engine import Engine
from tests.support.fake_executor import FakeExecutor, geometry


@pytest.fixture
def engine() -> Engine:
    return Engine(FakeExecutor(geometry(), hit_rate=0.6))


def params(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def test_prometheus_reads_the_counters(engine: Engine) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    collector = metrics.register(engine, registry)
    engine.generate([[1, 2], [3]], params(9))
    stats = engine.stats()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"compilespec_{name}", labels)

    assert value("emitted_tokens_total") == stats.num_emitted == 16
    assert value("verify_steps_total") == stats.num_verify_steps
    assert value("running_requests") == value("waiting_requests") == 0
    assert value("free_blocks") == value("blocks") == engine.geometry.config.num_blocks
    assert value("decodes_by_drafts_total", drafts="3") == sum(stats.num_decodes_by_k.values())
    assert value("seconds_total", phase="decode") == pytest.approx(stats.decode_ms / 1e3)
    assert value("acceptance_rate", position="2") == stats.acceptance_rate_by_position[2]
    text = prometheus.generate_latest(registry).decode()
    assert "compilespec_recompiles_total 0.0" in text
    registry.unregister(collector)


def test_without_the_extra_the_command_is_named(engine: Engine, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependency, match=r"pip install 'compilespec\[metrics\]'"):
        metrics.register(engine)


def test_moments_of_a_request(engine: Engine) -> None:
    request = engine.submit([5] * 20, params(12))
    waiting = engine.stats()
    assert (waiting.num_waiting, waiting.num_running) == (1, 0)
    engine.step()
    running = engine.stats()
    assert (running.num_waiting, running.num_running) == (0, 1)
    assert running.num_free_blocks < running.num_blocks
    while engine.has_work:
        engine.step()
    output = request.output()
    times = output.timings
    assert len(times.tokens_ms) == len(output.token_ids) == 12
    assert times.tokens_ms == sorted(times.tokens_ms)
    assert times.submitted_ms <= times.admitted_ms <= times.first_token_ms <= times.finished_ms
    assert times.queue_ms <= times.time_to_first_token_ms
    assert times.time_per_output_token_ms == pytest.approx(
        (times.tokens_ms[-1] - times.tokens_ms[0]) / 11
    )


def test_one_logger_tree() -> None:
    """An application quiets or keeps all of it by one name."""
    import compilespec  # noqa: F401  (what it imports has made its loggers)

    named = [n for n in logging.root.manager.loggerDict if "/" not in n]  # torch names some by file
    ours = [n for n in named if "compilespec" in n and "tests" not in n]
    assert ours
    assert all(name == "compilespec" or name.startswith("compilespec.") for name in ours)
