"""How many drafts a step verifies: by what steps cost, and by how many drafts were right lately.

Nothing here changes a token: any K gives the tokens of plain decoding.  What it bounds is the loss:
time spent on finding out whether drafts pay again is limited to a part of the time that plain
steps took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compilespec.runtime.acceptance_rates import AcceptanceRates
from compilespec.runtime.exploration import NUM_TRIAL_STEPS, Exploration
from compilespec.runtime.step_costs import StepCosts

SWITCH_GAIN = 0.03  # another K is taken when it is believed to be faster by so much
RETRY_SPEEDUP = (
    1.25  # another K is tried when it would win, were it faster than believed by so much
)
NUM_PLAIN_STEPS = 8  # plain steps that are decided at once


@dataclass(frozen=True, kw_only=True)
class Choice:
    """K of the next step, or steps, and why."""

    num_draft_tokens: int
    is_trial: bool = False  # to find out, against the estimate
    num_steps: int = 1


class DraftPolicy:
    """Chooses K for every step.

    Args:
        counts: the K that there are graphs for, at least two, in rising order.
        costs: what a step of each takes.
    """

    def __init__(self, counts: Sequence[int], costs: StepCosts) -> None:
        self.counts = tuple(counts)
        self.costs = costs
        self.acceptance = AcceptanceRates(self.counts[-1])
        self.num_steps = dict.fromkeys(self.counts, 0)
        self._exploration = Exploration(self.counts, costs.step(self.counts[0], 1))
        self._current = self.counts[-1]
        self._best_speed = 0.0  # tokens a millisecond of the K that seemed best

    def choose(self, drafted: Sequence[int], batch: int, *, needs_replay: bool = False) -> Choice:
        """K of the next step.

        Args:
            drafted: for each request whose drafter can be used, the most drafts it takes.
            batch: requests of the step, those without a drafter included.
            needs_replay: whether some of them had steps of K = 0.
        """
        best = self._best(drafted, batch)
        for count in self.counts if drafted else ():
            if not self.costs.is_served(count, batch) and self._may_meet(count, batch):
                return Choice(num_draft_tokens=count, is_trial=True)
        if self._exploration.is_trying:
            self._exploration.stop_unless(bool(drafted), best)
        elif drafted:
            self._begin_trial(best, drafted, batch, needs_replay)
        if self._exploration.is_trying:
            return Choice(num_draft_tokens=self._exploration.next_step(), is_trial=True)
        several = not best and self.costs.is_settled
        return Choice(num_draft_tokens=best, num_steps=NUM_PLAIN_STEPS if several else 1)

    def observe(
        self, count: int, batch: int, elapsed_ms: float, emitted: Sequence[int], *, trial: bool
    ) -> None:
        """Learn from a step of K = `count`.

        Args:
            emitted: tokens of each request whose drafts counted: up to its own K + 1.
        """
        self.num_steps[count] += 1
        self.costs.update(count, batch, elapsed_ms)
        if not trial:
            self._exploration.earn(elapsed_ms)
        else:
            tokens = batch + sum(emitted) - len(emitted)
            self._exploration.pay(elapsed_ms - tokens / self._best_speed)
        for num_emitted in emitted if count else ():
            self.acceptance.learn(count, num_emitted)

    def pass_over(self, elapsed_ms: float) -> None:
        """A plain step that was decided with others: nothing is learnt from it."""
        self.num_steps[0] += 1
        self._exploration.earn(elapsed_ms)

    def may_keep_warm(self, batch: int) -> bool:
        """Whether rows whose kept inputs would be lost are worth a replay now; pays for it."""
        cost = self.costs.replay(batch)
        dearer = self.costs.step(self._smallest(), batch) - self.costs.step(0, batch)
        trial_ms = NUM_TRIAL_STEPS * max(0.0, dearer)
        if not self._could_pay(batch) or not self._exploration.can_pay(cost + trial_ms / 2):
            return False  # the trial itself comes first
        self._exploration.pay(cost)
        return True

    def pay_replay(self, batch: int) -> None:
        """A replay before a trial belongs to the trial's cost."""
        self._exploration.pay(self.costs.replay(batch))

    def rates(self) -> list[float]:
        """Acceptance of draft 1, 2, ..., given those before it were accepted."""
        return self.acceptance.rates()

    def describe(self) -> dict[str, object]:
        """For `Engine.plan()`."""
        return {
            "counts": self.counts,
            "acceptance_by_position": [round(rate, 3) for rate in self.rates()],
            "step_ms": self.costs.table(),
            "num_steps": dict(self.num_steps),
        }

    # --- speeds ---

    def _best(self, drafted: Sequence[int], batch: int) -> int:
        """The K of most tokens a millisecond; the one in use, unless another is clearly better."""
        expected = self.acceptance.expected()
        speeds = {count: self._speed(count, drafted, batch, expected) for count in self.counts}
        best = max(speeds, key=lambda count: speeds[count])
        if speeds[best] > (1 + SWITCH_GAIN) * speeds[self._current]:
            self._current = best
        self._best_speed = speeds[self._current]
        return self._current

    def _speed(
        self, count: int, drafted: Sequence[int], batch: int, expected: Sequence[float]
    ) -> float:
        """Tokens a millisecond, where `expected[n]` of n drafts are accepted."""
        return _num_tokens(count, drafted, batch, expected) / self.costs.step(count, batch)

    def _could_pay(self, batch: int, drafted: Sequence[int] | None = None) -> bool:
        """Whether drafts that are all right would beat plain steps."""
        rows = [self.counts[-1]] * batch if drafted is None else drafted
        all_right = range(self.counts[-1] + 1)
        plain = self._speed(self.counts[0], rows, batch, all_right)
        return any(self._speed(k, rows, batch, all_right) > plain for k in self.counts[1:])

    def _smallest(self) -> int:
        return next(count for count in self.counts if count)

    # --- trials ---

    def _may_meet(self, count: int, batch: int) -> bool:
        """Whether a step of a K whose time was never seen in service can be paid for."""
        dearer = self.costs.step(count, batch) - self.costs.step(self.counts[0], batch)
        return self._exploration.can_pay(dearer)

    def _begin_trial(
        self, best: int, drafted: Sequence[int], batch: int, needs_replay: bool
    ) -> None:
        """Try another K, if one could be better after all and there is budget for it."""
        count = self._worth_a_trial(best, drafted, batch)
        if count is None:
            return
        replay_ms = self.costs.replay(batch) if needs_replay or not count else 0.0
        tokens = _num_tokens(count, drafted, batch, self.acceptance.expected())
        dearer = self.costs.step(count, batch) - tokens / self._best_speed
        if not self._exploration.can_pay_trial(dearer, replay_ms):
            return
        self._exploration.begin(count, sum(self.num_steps.values()))
        if not count:
            self._exploration.pay(replay_ms)  # of the step after the trial

    def _worth_a_trial(self, best: int, drafted: Sequence[int], batch: int) -> int | None:
        """The K to try.

        From plain steps the fewest drafts, if right ones would pay.  Between other K it is the
        steps' times that may be wrong: of those that are near, the one not tried for longest.
        """
        if not best:
            return self._smallest() if self._could_pay(batch, drafted) else None
        expected, least = self.acceptance.expected(), self._best_speed / RETRY_SPEEDUP
        near = [
            count
            for count in self.counts
            if count != best and self._speed(count, drafted, batch, expected) > least
        ]
        return self._exploration.longest_untried(near)


def _num_tokens(count: int, drafted: Sequence[int], batch: int, expected: Sequence[float]) -> float:
    """Tokens of a step of K = `count`, where `expected[n]` of n drafts are accepted."""
    return batch + sum(expected[min(count, most)] for most in drafted)
