"""The calls of the program: launched, timed and counted, and read later, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compilespec.program import Phase
from compilespec.runtime.adaptive import AdaptiveDrafts, StepPlan
from compilespec.runtime.executor import Executor, PrefillChunk
from compilespec.runtime.host_masks import write_masks
from compilespec.runtime.outputs import now_ms
from compilespec.runtime.request import Request
from compilespec.runtime.stats import StatsRecorder


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A call of the program, and the requests that it names."""

    phase: Phase
    step: int
    handle: Any
    most: Mapping[Request, int]  # tokens that it may give, by request, in order
    ends: Mapping[Request, int]  # prefill: where each chunk ends
    started_ms: float = 0.0
    plan: StepPlan | None = None  # the plan of a step whose K was chosen

    def num_computed(self, request: Request, num_given: int) -> int:
        """Tokens of a request that are surely in the cache once this launch gave it `given`
        tokens.
        """
        return self.ends.get(request, request.num_computed + num_given)


class Launches:
    """Calls the program, and keeps the launches that were not read yet: `in_flight`, the oldest
    first.

    Args:
        adaptive: chooses K of every decode step, where the program has several.
    """

    def __init__(
        self, executor: Executor, stats: StatsRecorder, adaptive: AdaptiveDrafts | None
    ) -> None:
        self.in_flight: deque[Launch] = deque()
        self.adaptive = adaptive
        self._executor, self._stats = executor, stats
        self._step = 0
        self._read_ms = 0.0  # the moment when the last one was read

    def begin_step(self) -> None:
        """Begin the next step: later launches belong to it."""
        self._step += 1

    def prefill(self, chunks: Mapping[Request, PrefillChunk]) -> None:
        with self._stats.time("prefill"):
            handle = self._executor.launch_prefill(list(chunks.values()))
        self._stats.count_prefill()
        self.in_flight.append(
            Launch(
                phase="prefill",
                step=self._step,
                handle=handle,
                most={request: int(chunk.finished) for request, chunk in chunks.items()},
                ends={request: chunk.end for request, chunk in chunks.items()},
            )
        )

    def decode(self, requests: Sequence[Request]) -> None:
        with self._stats.time("decode"):
            is_late = any(map(self.names, requests)) if self.in_flight else False
            plan = None
            if self.adaptive is not None:
                plan = self.adaptive.begin(requests, is_late=is_late)
            started = now_ms()  # the time of choosing K, and of a catch-up, is not this K's
            if plan is not None:
                write_masks(self._executor, plan.redrafted, drafted=True)
            count = None if plan is None else plan.num_draft_tokens
            handle = self._executor.launch_decode([request.row for request in requests], count)
        count = self._executor.geometry.config.num_draft_tokens if count is None else count
        self._stats.count_decode(len(requests), count)
        self.in_flight.append(
            Launch(
                phase="decode",
                step=self._step,
                handle=handle,
                most=dict.fromkeys(requests, count + 1),
                ends={},
                started_ms=started,
                plan=plan,
            )
        )

    def is_due(self, *, spare_this_step: bool) -> bool:
        """True where a launch is in flight that must be read; with `spare_newest`, one of an
        earlier step.
        """
        return bool(self.in_flight) and not (
            spare_this_step and self.in_flight[0].step == self._step
        )

    def read(self) -> tuple[Launch, list[list[int]]]:
        """Wait for the oldest launch; returns the tokens of each request that it names, in
        order.
        """
        launch = self.in_flight.popleft()
        with self._stats.time(launch.phase):
            given = self._executor.collect(launch.handle)
        if self.adaptive is not None:
            evidence = self._executor.evidence(launch.handle)
            requests = list(launch.most)
            if launch.plan is not None:
                elapsed = now_ms() - max(launch.started_ms, self._read_ms)
                self.adaptive.end(launch.plan, requests, given, evidence, elapsed)
            else:
                self.adaptive.note(requests, evidence)
        self._read_ms = now_ms()
        return launch, given

    def names(self, request: Request) -> bool:
        """True where a launch in flight names the request."""
        return any(request in launch.most for launch in self.in_flight)

    def num_coming(self, request: Request) -> int:
        """The largest number of tokens that the launches in flight may give a request."""
        return sum(launch.most.get(request, 0) for launch in self.in_flight)

    def num_sure(self, request: Request) -> int:
        """The smallest number of tokens that the launches in flight give a request."""
        return sum(launch.most.get(request, 0) > 0 for launch in self.in_flight)
