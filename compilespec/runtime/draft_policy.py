"""K of the next step: the one of most expected tokens a measured millisecond.

Nothing here changes a token: any K gives the tokens of plain decoding.  Time spent on finding out
whether drafts pay again is limited to a share of the time of other steps.  Gains beside numbers,
here and in what this imports, are those of docs/lab/methods.md, "What choosing K keeps".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from compilespec.runtime.acceptance_rates import AcceptanceRates, JudgedDrafts
from compilespec.runtime.step_costs import StepCosts

TIME_SHARE = 0.01  # of the time of steps, for trials: 0.4% with eagle3, and bounds what is lost
BUDGET_STEPS = 16  # of the largest K: the most that is saved up for trials
LEARN_INTERVAL = 8  # steps decided, and learnt from, together: costs 0.5%, saves 30 us a step


class StepChoice(NamedTuple):
    """K of the next step."""

    num_draft_tokens: int = 0
    is_trial: bool = False  # to find out, against the estimate


class Drafted(NamedTuple):
    """A request whose drafter can be used, before a step."""

    most: int  # drafts that it takes
    confidence: int = 0  # how sure its drafts are (`passes/splice/evidence.py`)
    num_drafts: int | None = None  # that are there now; None: not known
    is_found: bool = False  # looked up: however many a step verifies, the next one has as many


class DraftPolicy:
    """Chooses K for every step.

    Args:
        counts: the K that there are graphs for, at least two, in rising order.
        costs: what a step of each takes.
        looks_up: whether drafts are found in texts, now and then: every step is decided anew.
    """

    def __init__(self, counts: Sequence[int], costs: StepCosts, *, looks_up: bool = False) -> None:
        self.counts = tuple(counts)
        self.costs = costs
        self.acceptance = AcceptanceRates(self.counts[-1])
        self.num_steps = dict.fromkeys(self.counts, 0)
        self.reasons: Counter[str] = Counter()  # steps, by why they had their K
        self._smallest = next(count for count in self.counts if count)
        self._num_together = 1 if looks_up else LEARN_INTERVAL
        self._num_ahead, self._ahead = 0, StepChoice()  # steps to come that are decided already
        self._ahead_for: tuple[int, list[int]] = (0, [])  # a batch, and the drafts of each in it
        self._budget_ms = BUDGET_STEPS * costs.step(self.counts[0], 1)
        self._best_speed = 0.0  # tokens a millisecond of the K that seemed best
        self._noted: Counter[JudgedDrafts] = Counter()  # since something was learnt last
        self._num_judged = 0  # steps, since then, of which drafts are known

    def begin_text(self) -> None:
        """A request begins, whose drafts may do better than those before: one trial is allowed."""
        loss = self.costs.step(self._smallest, 1) - self.costs.step(self.counts[0], 1)
        self._budget_ms = max(self._budget_ms, LEARN_INTERVAL * loss)

    def choose(
        self, drafted: Sequence[Drafted], batch: int, *, needs_replay: bool = False
    ) -> StepChoice:
        """K of the next step of a batch, whose requests with a drafter to use are `drafted`.

        Args: needs_replay: whether some of them had steps of K = 0.
        """
        batch_now = batch, [one.most for one in drafted]
        if self._num_ahead and self._ahead_for == batch_now:
            self._num_ahead -= 1
            self.reasons["trial" if self._ahead.is_trial else "decided with the step before"] += 1
            return self._ahead
        if not self.counts[0] and all(one.is_found and one.num_drafts == 0 for one in drafted):
            self.reasons["nothing to verify"] += 1
            return StepChoice()
        speeds = self._speeds([self._share(one) for one in drafted], batch)
        self._best_speed = max(speeds)
        best = self.counts[speeds.index(self._best_speed)]
        if self.costs.doubtful(batch) and self._budget_ms >= self.costs.step(best, batch):
            self.reasons["first use of a K"] += 1
            return StepChoice(self.costs.doubtful(batch)[0], is_trial=True)
        self._ahead, self._num_ahead = StepChoice(best), self._num_together - 1
        self._ahead_for = batch_now
        reason = "drafts pay" if best else "drafts do not pay"
        replay_ms = self.costs.replay(batch) if needs_replay else 0.0
        if not best and self._is_worth_a_trial(speeds, drafted, batch, replay_ms):
            self._ahead, self._num_ahead = StepChoice(self._smallest, True), LEARN_INTERVAL - 1
            self._budget_ms -= replay_ms
            reason = "trial"
        self.reasons[reason] += 1
        return self._ahead

    def observe(
        self,
        count: int,
        batch: int,
        elapsed_ms: float,
        judged: Sequence[JudgedDrafts],
        *,
        is_trial: bool = False,
    ) -> None:
        """Learn from a step of K = `count`; `judged`: each request's drafts, where they counted."""
        self.num_steps[count] += 1
        self.costs.update(count, batch, elapsed_ms)
        if is_trial:
            tokens = batch + sum(min(one.num_right, count) for one in judged)
            self._budget_ms -= max(0.0, elapsed_ms - tokens / self._best_speed)
        else:
            self._budget_ms += TIME_SHARE * elapsed_ms
        self._noted.update(judged)
        self._num_judged += bool(judged)
        if self._num_judged == LEARN_INTERVAL:
            self._learn()

    def describe(self) -> dict[str, object]:
        """For `Engine.plan()`."""
        self._learn()
        return {
            "counts": self.counts,
            "acceptance_by_position": _rounded(self.acceptance.rates()),
            "acceptance_by_level": {
                one: _rounded(rates) for one, rates in self.acceptance.by_confidence().items()
            },
            "step_ms": self.costs.table(),
            "num_steps": dict(self.num_steps),
            "num_steps_by_reason": dict(self.reasons),
        }

    def _learn(self) -> None:
        self.acceptance.learn(self._noted, self._num_judged)
        self._noted.clear()
        self._num_judged = 0

    def _speeds(self, shares: Sequence[Sequence[float]], batch: int) -> list[float]:
        """Tokens a millisecond of every K, of requests with these shares and others.

        The speed of a batch is the harmonic mean of its requests': drafts that help a few delay
        the others, and the last one to end gains nothing.
        """
        times, without = self.costs.steps(batch), batch - len(shares)
        of_all = map(sum, zip(*shares, strict=True)) if shares else [0.0] * len(times)
        return [batch * batch / ((without + of) * ms) for of, ms in zip(of_all, times, strict=True)]

    def _share(self, one: Drafted) -> list[float]:
        """By K: of a step, what one token of the request takes."""
        there = one.num_drafts if one.is_found else None
        most = one.most if there is None else min(one.most, there)
        expected = self.acceptance.expected(one.confidence)
        return [1 / (1 + expected[min(count, most)]) for count in self.counts]

    def _is_worth_a_trial(
        self, speeds: Sequence[float], drafted: Sequence[Drafted], batch: int, replay_ms: float
    ) -> bool:
        """True where the fewest drafts could pay after all, and there is budget to find out."""
        if all(one.is_found for one in drafted):
            return False  # plain steps judge the first of what was found
        saved_ms = BUDGET_STEPS * self.costs.step(self.counts[-1], batch)
        worth = speeds[self.counts.index(self._smallest)] / self._best_speed
        loss = LEARN_INTERVAL * self.costs.step(self._smallest, batch) * (1 - worth)
        all_right = [[1 / (1 + min(count, one.most)) for count in self.counts] for one in drafted]
        plain, *others = self._speeds(all_right, batch)
        self._budget_ms = min(self._budget_ms, saved_ms)
        return self._budget_ms >= loss + replay_ms and max(others) > plain


def _rounded(rates: Sequence[float]) -> list[float]:
    return [round(rate, 3) for rate in rates]
