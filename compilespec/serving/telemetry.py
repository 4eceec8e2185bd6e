"""Counters of the server for Prometheus, beside those of its engine."""

from __future__ import annotations

from typing import Any

from compilespec import metrics
from compilespec.errors import MissingDependency
from compilespec.serving.service import Service

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Telemetry:
    """The counters of /metrics.

    Args:
        routes: paths that are counted by name; all others count as one.
    Raises: MissingDependency without prometheus-client.
    """

    def __init__(self, service: Service, routes: tuple[str, ...]) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise MissingDependency(f"metrics need prometheus-client: {metrics.INSTALL}") from error
        self._client, self._routes = client, routes
        self.registry = client.CollectorRegistry()
        metrics.register(service.engine, self.registry)
        self._requests = client.Counter(
            "compilespec_http_requests", "Requests by path and status", ["path", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._seconds = client.Histogram(
            "compilespec_http_seconds", "From a request to the end of its answer", ["path"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        open_requests = client.Gauge(
            "compilespec_open_requests", "Requests of the engine that have not ended",
            registry=self.registry,
        )  # fmt: skip
        open_requests.set_function(lambda: service.thread.health().num_open)

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        path = path if path in self._routes else "other"
        self._requests.labels(path, str(status or 499)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """The text of a scrape, and its content type."""
        return self._client.generate_latest(self.registry), self._client.CONTENT_TYPE_LATEST


def stats_of(service: Service) -> dict[str, Any]:
    """The engine's figures for /stats."""
    stats, plan = service.thread.stats(), service.engine.plan()
    return {
        "model": service.options.model_names[0],
        "method": plan.get("method"),
        "num_draft_tokens": list(service.engine.geometry.config.draft_counts),
        "max_batch_size": service.engine.geometry.config.max_batch_size,
        "max_seq_len": service.engine.geometry.config.max_seq_len,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_open": service.thread.health().num_open,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "num_verify_steps": stats.num_verify_steps,
        "num_emitted": stats.num_emitted,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate_by_position": list(stats.acceptance_rate_by_position),
        "num_cached_tokens": stats.num_cached_tokens,
        "num_tokens_from_host": stats.num_tokens_from_host,
        "num_tokens_from_disk": stats.num_tokens_from_disk,
        "num_preemptions": stats.num_preemptions,
        "num_recompiles": stats.num_recompiles,
        "decodes_by_k": {str(k): count for k, count in stats.num_decodes_by_k.items()},
    }
