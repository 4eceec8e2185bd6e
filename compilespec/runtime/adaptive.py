"""Steps of several K: which comes next, and drafters that were left behind brought up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compilespec.program import NUM_KEPT
from compilespec.runtime.draft_policy import DraftPolicy
from compilespec.runtime.executor import Executor
from compilespec.runtime.request import Request


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A step that was launched: what is learnt from it when its tokens are read."""

    num_draft_tokens: int
    is_trial: bool = False
    judged: frozenset[Request] = frozenset()  # whose drafts count: up to date, of this K or more
    given_up: frozenset[Request] = frozenset()  # whose drafters do not see its tokens


PLAIN = StepPlan(num_draft_tokens=0)  # decided together with the step before


class AdaptiveDrafts:
    """Between the scheduler and the policy: knows which drafters are up to date.

    `Request.backlog` counts the steps of K = 0 that a drafter with a cache of its own has not seen.
    Up to NUM_KEPT of them can be replayed; a request with more is never drafted again (H-23).
    """

    def __init__(self, executor: Executor, policy: DraftPolicy) -> None:
        self.policy = policy
        self._executor = executor
        self._most = executor.geometry.num_draft_tokens
        self._replays = executor.geometry.needs_replay
        self._num_plain = 0  # steps to come that were decided already, for these requests:
        self._decided_for: Sequence[Request] = ()

    def begin(self, requests: Sequence[Request]) -> StepPlan:
        """Choose K for the step of these requests, which follows at once."""
        if self._num_plain and requests == self._decided_for:
            self._num_plain -= 1
            self._note_plain(requests)
            return PLAIN
        warm = [request for request in requests if request.backlog <= NUM_KEPT]
        behind = [request for request in warm if request.backlog]
        choice = self.policy.choose(
            [self._own(request) for request in warm], len(requests), needs_replay=bool(behind)
        )
        count = choice.num_draft_tokens
        if count and behind:
            self._replay(behind)
            if choice.is_trial:
                self.policy.pay_replay(len(behind))
        elif self._would_be_lost(behind) and self.policy.may_keep_warm(len(behind)):
            self._replay(behind)
        if not count:
            self._note_plain(requests)
            kept = NUM_KEPT - max((request.backlog for request in warm), default=0)
            self._num_plain = min(choice.num_steps - 1, max(0, kept))
            self._decided_for = requests
        return StepPlan(
            num_draft_tokens=count,
            is_trial=choice.is_trial,
            judged=frozenset(request for request in warm if self._own(request) >= count),
            given_up=frozenset(requests).difference(warm) if count else frozenset(),
        )

    def end(
        self, plan: StepPlan, requests: Sequence[Request], given: Sequence[Sequence[int]],
        elapsed_ms: float,
    ) -> None:  # fmt: skip
        """The step's tokens were read."""
        if plan is PLAIN:
            self.policy.pass_over(elapsed_ms)
            return
        count = plan.num_draft_tokens
        emitted = []
        for request, tokens in zip(requests, given, strict=True):
            if request in plan.judged:
                emitted.append(len(tokens))
            elif request in plan.given_up:
                request.backlog += len(tokens)
        self.policy.observe(count, len(requests), elapsed_ms, emitted, trial=plan.is_trial)

    def _note_plain(self, requests: Sequence[Request]) -> None:
        if self._replays:
            for request in requests:
                request.backlog += 1

    def _would_be_lost(self, behind: Sequence[Request]) -> bool:
        return any(request.backlog == NUM_KEPT for request in behind)

    def _own(self, request: Request) -> int:
        own = request.params.num_draft_tokens
        return self._most if own is None else min(own, self._most)

    def _replay(self, requests: Sequence[Request]) -> None:
        rows = [request.row for request in requests]
        self._executor.replay(rows, [request.backlog for request in requests])
        for request in requests:
            request.backlog = 0
