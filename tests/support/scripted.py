"""Engines of several K whose K comes from a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from compilespec.runtime.draft_policy import Drafted, StepChoice


class Scripted:
    """A policy that takes K from a list."""

    def __init__(self, counts: Iterator[int]) -> None:
        self.counts, self.taken = counts, list[int]()

    def choose(self, drafted: Sequence[Drafted], batch: int, *, needs_replay: bool) -> StepChoice:
        self.taken.append(next(self.counts))
        return StepChoice(num_draft_tokens=self.taken[-1])

    def begin_text(self) -> None: ...

    def observe(self, *args: Any, **kwargs: Any) -> None: ...


def use(engine: Any, policy: Scripted) -> Scripted:
    engine._scheduler.launches.adaptive.policy = policy
    return policy
