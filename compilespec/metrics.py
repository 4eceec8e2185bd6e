"""An engine's counters for Prometheus: `register(engine)`, with the extra `metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compilespec.errors import MissingDependency
from compilespec.runtime.engine import Engine

INSTALL = "pip install 'compilespec[metrics]'"
COUNTERS = {
    "verify_steps": ("num_verify_steps", "Verify steps, counted per request"),
    "emitted_tokens": ("num_emitted", "Tokens that verify steps delivered"),
    "prefills": ("num_prefills", "Prefill calls"),
    "preemptions": ("num_preemptions", "Requests that had to make room and were computed anew"),
    "cached_prompt_tokens": ("num_cached_tokens", "Prompt tokens found in the KV cache"),
    "tokens_from_host": ("num_tokens_from_host", "Tokens of prefixes copied back from host memory"),
    "tokens_from_disk": ("num_tokens_from_disk", "Tokens of prefixes read from a folder"),
    "state_copies": ("num_state_copies", "Copies of state that the host wrote to the device"),
    "recompiles": ("num_recompiles", "Compilations while serving: anything but 0 is a bug"),
}
GAUGES = {
    "running_requests": ("num_running", "Requests with a state row"),
    "waiting_requests": ("num_waiting", "Requests in line"),
    "free_blocks": ("num_free_blocks", "Blocks of the KV cache that nobody holds"),
    "blocks": ("num_blocks", "Blocks of the KV cache"),
    "acceptance_length": ("acceptance_length", "Tokens of a verify step, mean since the start"),
}
BY_LABEL = {
    "decodes_by_bucket": ("num_decodes_by_bucket", "bucket", "Decode calls by batch bucket"),
    "decodes_by_drafts": ("num_decodes_by_k", "drafts", "Decode calls by drafts verified"),
}


def register(engine: Engine, registry: Any = None) -> Any:
    """Let Prometheus read the engine's counters whenever it scrapes.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; None takes the process's own.
    Returns: the collector, for `registry.unregister`.
    Raises: MissingDependency without prometheus-client.
    """
    try:
        import prometheus_client
        from prometheus_client import core
    except ImportError as error:
        raise MissingDependency(f"metrics need prometheus-client: {INSTALL}") from error

    class EngineCollector:
        """Reads `Engine.stats()` once a scrape."""

        def collect(self) -> Iterator[Any]:
            stats = engine.stats()
            for name, (field, text) in COUNTERS.items():
                yield core.CounterMetricFamily(
                    f"compilespec_{name}", text, value=getattr(stats, field)
                )
            for name, (field, text) in GAUGES.items():
                yield core.GaugeMetricFamily(
                    f"compilespec_{name}", text, value=getattr(stats, field)
                )
            for name, (field, label, text) in BY_LABEL.items():
                family = core.CounterMetricFamily(f"compilespec_{name}", text, labels=[label])
                for key, count in getattr(stats, field).items():
                    family.add_metric([str(key)], count)
                yield family
            seconds = core.CounterMetricFamily(
                "compilespec_seconds", "Time spent in calls of the program", labels=["phase"]
            )
            seconds.add_metric(["prefill"], stats.prefill_ms / 1e3)
            seconds.add_metric(["decode"], stats.decode_ms / 1e3)
            yield seconds
            accepted = core.GaugeMetricFamily(
                "compilespec_acceptance_rate", "Verify steps that delivered a draft",
                labels=["position"],
            )  # fmt: skip
            for position, rate in enumerate(stats.acceptance_rate_by_position):
                accepted.add_metric([str(position)], rate)
            yield accepted

    collector = EngineCollector()
    (registry or prometheus_client.REGISTRY).register(collector)
    return collector
