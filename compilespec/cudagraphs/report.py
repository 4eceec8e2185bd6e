"""The cost of capturing, and what was left out: plain data for `Engine.plan()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from compilespec.cudagraphs.buckets import Bucket
from compilespec.cudagraphs.modes import GraphKind
from compilespec.program import StepKey


@dataclass(frozen=True)
class GraphKey:
    """The step, bucket and kind of capture that a recording is for."""

    step: StepKey
    bucket: Bucket
    kind: GraphKind

    def __str__(self) -> str:
        return f"{self.step}: {'x'.join(map(str, self.bucket))} ({self.kind})"


@dataclass(frozen=True, kw_only=True)
class CaptureRecord:
    """One bucket that was captured."""

    key: GraphKey
    num_graphs: int
    """Graphs of the bucket: one, or one per piece."""
    seconds: float
    mib: float
    """Memory that the pool allocated for it; later buckets share what earlier ones allocated."""


@dataclass(kw_only=True)
class CaptureReport:
    """Grows while serving if buckets are captured when they are first needed."""

    mode: str
    driver: str
    captured: list[CaptureRecord] = field(default_factory=list)
    dropped: dict[GraphKey, str] = field(default_factory=dict)
    """The reason why the bucket has no graph.  Its batches run in a larger bucket, or
    uncaptured.
    """
    refused: dict[StepKey, str] = field(default_factory=dict)
    """The reason why the step has no graphs: the operator in which the host waits for the
    device.
    """
    num_replays: int = 0
    num_uncaptured: int = 0
    """Calls of phases with graphs in which no graph fitted the batch."""

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.captured)

    @property
    def mib(self) -> float:
        return sum(record.mib for record in self.captured)

    def as_dict(self) -> dict[str, Any]:
        graphs = [
            {
                "phase": record.key.step.phase,
                "step": str(record.key.step),
                "bucket": record.key.bucket,
                "kind": record.key.kind,
                "num_graphs": record.num_graphs,
                "seconds": record.seconds,
                "mib": record.mib,
            }
            for record in self.captured
        ]
        return {
            "mode": self.mode,
            "driver": self.driver,
            "seconds": self.seconds,
            "mib": self.mib,
            "num_replays": self.num_replays,
            "num_uncaptured": self.num_uncaptured,
            "graphs": graphs,
            "dropped": {str(key): reason for key, reason in self.dropped.items()},
            "refused": {str(key): reason for key, reason in self.refused.items()},
        }
