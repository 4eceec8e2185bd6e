"""Steps of several K: which comes next, and drafters that were left behind brought up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from compilespec.passes.splice.evidence import FIRST_MATCH, Evidence
from compilespec.program import NUM_KEPT
from compilespec.runtime.draft_policy import LEARN_INTERVAL, Drafted, DraftPolicy, JudgedDrafts
from compilespec.runtime.executor import Executor
from compilespec.runtime.request import Request

NUM_LEARNT = 2  # requests of a step whose drafts are learnt from, in turn
NUM_UNSEEN = 16  # steps without a draft, one of which is decided like any other


class StepPlan(NamedTuple):
    """A step that was launched: what is learnt from it when its tokens are read."""

    num_draft_tokens: int
    is_trial: bool = False
    drafted: Mapping[Request, Drafted] = MappingProxyType({})  # those whose drafter can be used
    given_up: Sequence[Request] = ()  # whose drafters do not see its tokens
    why: str = ""  # of a step that was not chosen: nothing is learnt of it


PLAIN = StepPlan(num_draft_tokens=0, why="decided with the step before")
NOTHING_FOUND = StepPlan(num_draft_tokens=0, why="nothing to verify")


class AdaptiveDrafts:
    """Between the scheduler and the policy: knows which drafters are up to date, and what each
    request's last step said of its drafts.

    `Request.backlog` counts the steps of K = 0 that a drafter with its own cache has not seen.
    Up to NUM_KEPT of them can be replayed; a request with more is never drafted again (H-23).
    `Request.evidence` is None where nobody knows: after a replay, and before the first step.
    """

    def __init__(self, executor: Executor, policy: DraftPolicy) -> None:
        self.policy = policy
        self._executor = executor
        self._sizes = executor.geometry
        self._most = executor.geometry.config.num_draft_tokens
        self._may_skip = self._sizes.finds_all and 0 in self._sizes.config.draft_counts
        self._num_unseen = 0  # steps since the last one that was decided
        self._num_ahead = 0  # steps to come that were decided already, of this K and for these:
        self._count_ahead = 0
        self._decided_for: Sequence[Request] = ()
        self._ended: list[tuple[StepPlan, Any, Any, Any, float, float | None]] = []  # to learn from
        self._num_learnt = 0

    def begin(self, requests: Sequence[Request], *, is_late: bool = False) -> StepPlan:
        """Choose K for the step of these requests, which follows at once.

        Args:
            is_late: whether a step before it was not read yet, so that the evidence is of the
                drafts before these.
        """
        if self._num_ahead and requests == self._decided_for:
            return self._go_on(requests, is_late)
        if not self._sizes.capabilities.looks_up:
            self.learn()
        if self._may_skip and not is_late and self._has_nothing(requests):
            return NOTHING_FOUND
        drafted = {
            request: self._drafted(request, is_late)
            for request in requests
            if request.backlog <= NUM_KEPT
        }
        behind = [request for request in drafted if request.backlog]
        choice = self.policy.choose(
            list(drafted.values()), len(requests), needs_replay=bool(behind)
        )
        count = choice.num_draft_tokens
        if count and behind:
            self._replay(behind)
            if choice.is_trial:
                self.policy.pay_replay(len(behind))
        elif self._would_be_lost(behind) and self.policy.may_keep_warm(len(behind)):
            self._replay(behind)
        given_up: Sequence[Request] = ()
        self._num_ahead, self._count_ahead = choice.num_steps - 1, count
        self._decided_for = requests
        if not count:
            self._note_plain(requests)
            kept = NUM_KEPT - max((request.backlog for request in drafted), default=0)
            self._num_ahead = min(self._num_ahead, max(0, kept))
        elif len(drafted) < len(requests):
            given_up = [request for request in requests if request not in drafted]
            self._num_ahead = 0
        return StepPlan(
            num_draft_tokens=count, is_trial=choice.is_trial, drafted=drafted, given_up=given_up
        )

    def _go_on(self, requests: Sequence[Request], is_late: bool) -> StepPlan:
        """A step that was decided with the one before, of the same K."""
        self._num_ahead -= 1
        if not self._count_ahead:
            self._note_plain(requests)
            return PLAIN
        self.policy.go_on()
        drafted = {request: self._drafted(request, is_late) for request in requests}
        return StepPlan(num_draft_tokens=self._count_ahead, drafted=drafted)

    def end(
        self,
        plan: StepPlan,
        requests: Sequence[Request],
        given: Sequence[Sequence[int]],
        evidence: Sequence[Evidence],
        elapsed_ms: float,
        host_ms: float | None = None,
    ) -> None:
        """The step's tokens were read.

        Args:
            elapsed_ms: from its launch, or from when the step before it was read, if that is later.
            host_ms: what the host took between the two; None: it does not follow another step.
        """
        self.note(requests, evidence)
        if plan.why:
            self.policy.pass_over(elapsed_ms, plan.why)
            return
        if plan.given_up:
            for request, tokens in zip(requests, given, strict=True):
                request.backlog += len(tokens) if request in plan.given_up else 0
        self._ended.append((plan, requests, given, evidence, elapsed_ms, host_ms))
        if plan.is_trial or len(self._ended) == LEARN_INTERVAL:
            self.learn()

    def learn(self) -> None:
        """From a few steps together: what runs once a step has left the CPU's caches meanwhile, and
        takes several times as long.
        """
        for plan, requests, given, evidence, elapsed_ms, host_ms in self._ended:
            judged, count = [], plan.num_draft_tokens
            for place in self._learnt_places(len(requests), plan.is_trial):
                drafted = plan.drafted.get(requests[place])
                if drafted is not None and drafted.most >= count and given[place]:
                    tried = self._num_tried(drafted, count)
                    goes_on = bool(evidence) and evidence[place].goes_on
                    judged.append(
                        JudgedDrafts(tried, len(given[place]) - 1 + goes_on, drafted.level)
                    )
            self.policy.observe(
                count, len(requests), elapsed_ms, judged, trial=plan.is_trial, host_ms=host_ms
            )
        self._ended.clear()

    def describe(self) -> dict[str, object]:
        """For `Engine.plan()`."""
        self.learn()
        return self.policy.describe()

    def _learnt_places(self, batch: int, is_trial: bool) -> Iterable[int]:
        """Of the requests of a step; a trial's tokens are all counted, since they are paid for."""
        if is_trial or batch <= NUM_LEARNT:
            return range(batch)
        self._num_learnt += NUM_LEARNT
        return [(self._num_learnt + place) % batch for place in range(NUM_LEARNT)]

    def note(self, requests: Sequence[Request], evidence: Sequence[Evidence]) -> None:
        """What a call that was read says of the drafts that it left."""
        for request, one in zip(requests, evidence, strict=False):
            request.evidence = one

    def _has_nothing(self, requests: Sequence[Request]) -> bool:
        """True where no request has a draft.  Now and then such a step is decided nevertheless, so
        that its time is learnt.
        """
        if any(one.evidence is None or one.evidence.num_drafts for one in requests):
            return False
        self._num_unseen = (self._num_unseen + 1) % NUM_UNSEEN
        return self._num_unseen != 0

    def _drafted(self, request: Request, is_late: bool) -> Drafted:
        own, evidence = request.params.num_draft_tokens, request.evidence
        most = self._most if own is None else min(own, self._most)
        if evidence is None or not (self._sizes.capabilities.looks_up or evidence.num_drafts):
            return Drafted(most, is_found=self._sizes.finds_all)
        is_found = self._sizes.finds_all or evidence.level >= FIRST_MATCH
        if not is_found and request.backlog:  # a replay comes before they are verified
            return Drafted(most)
        known = None if is_late else evidence.num_drafts
        return Drafted(most, evidence.level, known, is_found)

    def _num_tried(self, drafted: Drafted, count: int) -> int:
        """Drafts of a step of K = `count` that could be right."""
        if not self._sizes.tells_evidence:
            return count
        if drafted.num_drafts is not None:
            return min(count + 1, drafted.num_drafts)
        return min(count + 1, self._most) if drafted.is_found else count

    def _note_plain(self, requests: Sequence[Request]) -> None:
        if self._sizes.needs_catch_up:
            for request in requests:
                request.backlog += 1

    def _would_be_lost(self, behind: Sequence[Request]) -> bool:
        return any(request.backlog == NUM_KEPT for request in behind)

    def _replay(self, requests: Sequence[Request]) -> None:
        rows = [request.row for request in requests]
        self._executor.catch_up(rows, [request.backlog for request in requests])
        for request in requests:
            request.backlog = 0
            if request.evidence is not None and request.evidence.level < FIRST_MATCH:
                request.evidence = None  # what was found stays
