"""Steps of several K: which comes next, and drafters that were left behind brought up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from compilespec.passes.splice.evidence import FIRST_MATCH, Evidence
from compilespec.program import NUM_KEPT
from compilespec.runtime.acceptance_rates import JudgedDrafts
from compilespec.runtime.draft_policy import Drafted, DraftPolicy
from compilespec.runtime.executor import Executor
from compilespec.runtime.request import Request


class StepPlan(NamedTuple):
    """A step that was launched: what is learnt from it when its tokens are read."""

    num_draft_tokens: int
    is_trial: bool = False
    drafted: Mapping[Request, Drafted] = MappingProxyType({})  # those whose drafter can be used
    redrafted: Sequence[Request] = ()  # those that caught up, and have other drafts now


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

    def begin(self, requests: Sequence[Request], *, is_late: bool = False) -> StepPlan:
        """Choose K for the step of these requests, which follows at once.  `is_late`: a step before
        it was not read yet; the evidence is of drafts before these.
        """
        if any(len(request.output_token_ids) == 1 for request in requests):
            self.policy.begin_text()
        usable = [request for request in requests if request.backlog <= NUM_KEPT]
        drafted = {request: self._drafted(request, is_late) for request in usable}
        behind = [request for request in drafted if request.backlog]
        count, is_trial = self.policy.choose(
            list(drafted.values()), len(requests), needs_replay=bool(behind)
        )
        if not count:
            self._note_plain(requests)
        elif behind:
            self._replay(behind)
        return StepPlan(count, is_trial, drafted, behind if count else ())

    def end(
        self,
        plan: StepPlan,
        requests: Sequence[Request],
        given: Sequence[Sequence[int]],
        evidence: Sequence[Evidence],
        elapsed_ms: float,
    ) -> None:
        """The step's tokens were read: learn from them.

        Args: elapsed_ms: from its launch, or the reading of the step before, if that is later.
        """
        self.note(requests, evidence)
        judged, count = [], plan.num_draft_tokens
        for place, (request, tokens) in enumerate(zip(requests, given, strict=True)):
            drafted = plan.drafted.get(request)
            if drafted is None:  # a drafter that was given up does not see the tokens either
                request.backlog += len(tokens) if count else 0
            elif drafted.most >= count and tokens and (tried := self._num_tried(drafted, count)):
                right = len(tokens) - 1 + (bool(evidence) and evidence[place].goes_on)
                judged.append(JudgedDrafts(tried, right, drafted.confidence))
        self.policy.observe(count, len(requests), elapsed_ms, judged, is_trial=plan.is_trial)

    def note(self, requests: Sequence[Request], evidence: Sequence[Evidence]) -> None:
        """What a call that was read says of the drafts that it left."""
        for request, one in zip(requests, evidence, strict=False):
            request.evidence = one

    def _drafted(self, request: Request, is_late: bool) -> Drafted:
        own, evidence = request.params.num_draft_tokens, request.evidence
        most = self._most if own is None else min(own, self._most)
        if evidence is None or not (self._sizes.capabilities.looks_up or evidence.num_drafts):
            return Drafted(most, is_found=self._sizes.finds_all)
        is_found = self._sizes.finds_all or evidence.confidence >= FIRST_MATCH
        if not is_found and request.backlog:  # a replay comes before they are verified
            return Drafted(most)
        known = None if is_late else evidence.num_drafts
        return Drafted(most, evidence.confidence, known, is_found)

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

    def _replay(self, requests: Sequence[Request]) -> None:
        rows = [request.row for request in requests]
        self._executor.catch_up(rows, [request.backlog for request in requests])
        for request in requests:
            request.backlog = 0
            if request.evidence is not None and request.evidence.confidence < FIRST_MATCH:
                request.evidence = None  # what was found stays
