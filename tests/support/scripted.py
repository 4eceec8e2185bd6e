"""Engines of several K whose K comes from a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from compilespec.runtime.draft_policy import Drafted, StepChoice


class Scripted:
    """A policy that takes K from a list, and keeps drafters warm or lets them go."""

    def __init__(self, counts: Iterator[int], *, keeps_warm: bool = True) -> None:
        self.counts, self.keeps_warm, self.taken = counts, keeps_warm, list[int]()

    def choose(self, drafted: Sequence[Drafted], batch: int, *, needs_replay: bool) -> StepChoice:
        self.taken.append(next(self.counts))
        return StepChoice(num_draft_tokens=self.taken[-1])

    def observe(self, *args: Any, **kwargs: Any) -> None: ...

    def may_keep_warm(self, batch: int) -> bool:
        return self.keeps_warm

    def pay_replay(self, batch: int) -> None: ...

    def pass_over(self, elapsed_ms: float, why: str) -> None:
        self.taken.append(0)  # nothing to verify, so that it was not asked


def use(engine: Any, policy: Scripted) -> Scripted:
    engine._scheduler.launches.adaptive.policy = policy
    return policy
