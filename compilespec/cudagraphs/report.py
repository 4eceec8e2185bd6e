"""What capturing cost, and what was left out: plain data for `Engine.plan()`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from compilespec.cudagraphs.buckets import Bucket
from compilespec.cudagraphs.modes import GraphKind
from compilespec.program import Phase


@dataclass(frozen=True)
class GraphKey:
    """What a recording is for."""

    phase: Phase
    bucket: Bucket
    kind: GraphKind
    variant: str = ""
    """Which of several graphs of the phase: "K=1", say; the phase's own where empty."""

    def __str__(self) -> str:
        name = f"{self.phase} {self.variant}".rstrip()
        return f"{name} {'x'.join(map(str, self.bucket))} ({self.kind})"


@dataclass(frozen=True, kw_only=True)
class CaptureRecord:
    """One bucket that was captured."""

    key: GraphKey
    num_graphs: int
    """One, or one a piece."""
    seconds: float
    mib: float
    """Memory that the pool took for it; later buckets share what earlier ones took."""


@dataclass(kw_only=True)
class CaptureReport:
    """Grows while serving, where buckets are captured when first asked for."""

    mode: str
    driver: str
    captured: list[CaptureRecord] = field(default_factory=list)
    dropped: dict[GraphKey, str] = field(default_factory=dict)
    """Why: batches of these sizes run in a larger bucket, or uncaptured."""
    num_replays: int = 0
    num_uncaptured: int = 0
    """Calls of phases with graphs that none served."""

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.captured)

    @property
    def mib(self) -> float:
        return sum(record.mib for record in self.captured)

    def as_dict(self) -> dict[str, Any]:
        graphs = [{**asdict(record.key), **asdict(record)} for record in self.captured]
        for graph in graphs:
            del graph["key"]
        return {
            "mode": self.mode,
            "driver": self.driver,
            "seconds": self.seconds,
            "mib": self.mib,
            "num_replays": self.num_replays,
            "num_uncaptured": self.num_uncaptured,
            "graphs": graphs,
            "dropped": {str(key): reason for key, reason in self.dropped.items()},
        }
