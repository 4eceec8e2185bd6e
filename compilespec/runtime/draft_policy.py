"""How many drafts a step verifies: by what steps cost, and by how many drafts were right lately.

Nothing here changes a token: any K gives the tokens of plain decoding.  What it bounds is the loss:
time spent on finding out whether drafts pay again is limited to a part of the time that plain
steps took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from compilespec.runtime.acceptance_rates import LearntAcceptance
from compilespec.runtime.exploration import Exploration
from compilespec.runtime.step_costs import StepCosts

SWITCH_GAIN = 0.03  # another K is taken when it is believed to be faster by so much
FOUND_GAIN = 0.05  # drafts that were found are verified when they beat the fewest by so much
RETRY_SPEEDUP = (
    1.25  # another K is tried when it would win, were it faster than believed by so much
)
NUM_SAVED_STEPS = 16  # of the largest K: what trials may cost is never saved up beyond that
TRIAL_INTERVAL = 4  # decisions for drafts, at one of which a trial is thought of
LEARN_INTERVAL = 8  # steps that are learnt from together, and those of a model decided together
DECIDED_BEFORE = "decided with the step before"
SHORTAGE = 1 / 8  # a K that rises is short of drafts for one of the steps that it stays: this share


class StepChoice(NamedTuple):
    """K of the next step, or steps, and why."""

    num_draft_tokens: int
    is_trial: bool = False  # to find out, against the estimate
    num_steps: int = 1


class Drafted(NamedTuple):
    """A request whose drafter can be used, before a step."""

    most: int  # drafts that it takes
    level: int = 0  # how sure its drafts are (`passes/splice/evidence.py`)
    num_drafts: int | None = None  # that are there now; None: not known
    is_found: bool = False  # looked up: however many a step verifies, the next one has as many


class JudgedDrafts(NamedTuple):
    """A request's drafts, after a step."""

    num_tried: int  # drafts that could be judged, one more than were verified where that one is
    num_right: int  # of these, before the first wrong one
    level: int = 0


UNSETTLED = StepChoice(num_draft_tokens=0)  # a plain step whose time tells how the K compare

Shares = tuple[float, ...]  # by K: of a step, what one token of a request takes


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
        self.acceptance = LearntAcceptance(self.counts[-1])
        self.num_steps = dict.fromkeys(self.counts, 0)
        self.reasons: Counter[str] = Counter()  # steps, by why they had their K
        self._looks_up = looks_up
        self._exploration = Exploration(self.counts, costs.step(self.counts[0], 1))
        self._num_decided = 0
        self._num_judged = 0  # steps, since something was learnt last, of which drafts are known
        self._current = len(self.counts) - 1  # the place in `counts` of the K in use
        self._best_speed = 0.0  # of the K that seemed best, as in `_speeds`
        self._choices = {
            count: StepChoice(
                num_draft_tokens=count,
                num_steps=1 if looks_up else LEARN_INTERVAL,
            )
            for count in self.counts
        }
        self._shares: dict[Drafted, Shares] = {}  # since something was learnt last

    def choose(
        self, drafted: Sequence[Drafted], batch: int, *, needs_replay: bool = False
    ) -> StepChoice:
        """K of the next step.

        Args:
            drafted: each request whose drafter can be used.
            batch: requests of the step, those without a drafter included.
            needs_replay: whether some of them had steps of K = 0.
        """
        best = self._best(drafted, batch)
        for count in self.costs.unserved(batch) if drafted else ():
            if self._may_meet(count, batch):
                self.reasons["first use of a K"] += 1
                return StepChoice(num_draft_tokens=count, is_trial=True)
        exploration = self._exploration
        if exploration.is_trying:
            exploration.stop_unless(bool(drafted), best)
        elif drafted and self._is_trial_due(best):
            self._begin_trial(best, drafted, batch, needs_replay)
        if exploration.is_trying:
            self.reasons["trial"] += 1
            return StepChoice(num_draft_tokens=exploration.next_step(), is_trial=True)
        self.reasons["drafts pay" if best else "drafts do not pay"] += 1
        return self._choices[best] if best or self.costs.is_settled else UNSETTLED

    def observe(
        self,
        count: int,
        batch: int,
        elapsed_ms: float,
        judged: Sequence[JudgedDrafts],
        *,
        trial: bool,
        host_ms: float | None = None,
    ) -> None:
        """Learn from a step of K = `count`.

        Args:
            judged: the drafts of each request for which they counted.
            host_ms: what the host took before it; None: it does not follow another step.
        """
        self.num_steps[count] += 1
        self.costs.update(count, batch, elapsed_ms, behind_prefill=host_ms is None)
        if host_ms is not None:
            self.costs.note_host(batch, host_ms)
        whole_ms = elapsed_ms + self.costs.host(batch)
        if not trial:
            self._exploration.earn(whole_ms)
        else:
            tokens = batch + sum(min(one.num_right, count) for one in judged)
            worth_ms = tokens / self._best_speed * self.costs.slowness(batch)
            self._exploration.pay(whole_ms - worth_ms)
        for num_tried, num_right, level in judged:
            if num_tried:
                self.acceptance.note(level, num_tried, num_right)
        self._num_judged += bool(judged)
        if self._num_judged == LEARN_INTERVAL:
            self._learn()

    def go_on(self) -> None:
        """A step with drafts was decided with the one before."""
        self.reasons[DECIDED_BEFORE] += 1

    def pass_over(self, elapsed_ms: float, why: str = DECIDED_BEFORE) -> None:
        """A plain step that was decided with others: nothing is learnt from it."""
        self.num_steps[0] += 1
        self.reasons[why] += 1
        self._exploration.earn(elapsed_ms)

    def may_keep_warm(self, batch: int) -> bool:
        """True where rows whose kept inputs would be lost are worth a replay now; pays for it."""
        cost = self.costs.replay(batch)
        count = self._smallest()
        dearer = self.costs.step(count, batch) - self.costs.step(0, batch)
        trial_ms = self.costs.num_until_compared(count) * max(0.0, dearer)
        if not self._could_pay(batch) or not self._exploration.can_pay(cost + trial_ms / 2):
            return False  # the trial itself comes first
        self._exploration.pay(cost)
        return True

    def pay_replay(self, batch: int) -> None:
        """A replay before a trial belongs to the trial's cost."""
        self._exploration.pay(self.costs.replay(batch))

    def rates(self) -> list[float]:
        """Acceptance of draft 1, 2, ..., given those before it were accepted."""
        self._learn()
        return self.acceptance.pooled.rates()

    def describe(self) -> dict[str, object]:
        """For `Engine.plan()`."""
        self._learn()
        return {
            "counts": self.counts,
            "acceptance_by_position": [round(rate, 3) for rate in self.rates()],
            "acceptance_by_level": {
                level: [round(rate, 3) for rate in rates]
                for level, rates in self.acceptance.by_level().items()
            },
            "step_ms": self.costs.table(),
            "num_steps": dict(self.num_steps),
            "num_steps_by_reason": dict(self.reasons),
        }

    def _learn(self) -> None:
        if self._num_judged:
            self.acceptance.learn(self._num_judged)
            self._num_judged = 0
            self._shares.clear()

    # --- speeds ---

    def _best(self, drafted: Sequence[Drafted], batch: int) -> int:
        """The K of most tokens a millisecond; the one in use, unless another is clearly better.
        What a look-up found is another thing at every step: there the one in use has no advantage,
        but the smallest has, since of many estimates the highest is too high.
        """
        known = self._shares
        speeds = self._speeds([known.get(one) or self._share(one) for one in drafted], batch)
        best = max(speeds)
        if all(one.is_found for one in drafted):
            pays = best > (1 + FOUND_GAIN) * speeds[0]
            self._current = speeds.index(best) if pays else 0
        elif best > (1 + SWITCH_GAIN) * speeds[self._current]:
            self._current = speeds.index(best)
        self._best_speed = speeds[self._current]
        return self.counts[self._current]

    def _speeds(self, shares: Sequence[Shares], batch: int) -> list[float]:
        """Tokens a millisecond of every K at the machine's usual speed, for requests whose drafts
        are given and others that have none.

        The speed of a batch is the harmonic mean of its requests': drafts that help a few delay
        the others, and the last one to end gains nothing.
        """
        times = self.costs.at_usual_speed(batch)
        if not shares:
            return [batch / ms for ms in times]
        of_all = shares[0] if len(shares) == 1 else map(sum, zip(*shares, strict=True))
        without = batch - len(shares)
        return [batch * batch / ((without + of) * ms) for of, ms in zip(of_all, times, strict=True)]

    def _share(self, one: Drafted) -> Shares:
        by_count, usual = self.acceptance.expected(one.level), self.acceptance.expected_of_all()
        shares = self._shares_of(one, by_count, usual)
        self._shares[one] = shares
        return shares

    def _shares_of(self, one: Drafted, by_count: Sequence[float], usual: Sequence[float]) -> Shares:
        return tuple(1 / (1 + _num_accepted(k, one, by_count, usual)) for k in self.counts)

    def _usual_speeds(self, drafted: Sequence[Drafted], batch: int) -> list[float]:
        """Speeds by K, without what a model says of its drafts in this step."""
        usual = self.acceptance.expected_of_all()
        shares = [
            self._share(one) if one.is_found else self._shares_of(Drafted(one.most), usual, usual)
            for one in drafted
        ]
        return self._speeds(shares, batch)

    def _could_pay(self, batch: int, drafted: Sequence[Drafted] | None = None) -> bool:
        """True where drafts that are all right would beat plain steps."""
        rows = [Drafted(self.counts[-1])] * batch if drafted is None else drafted
        all_right = range(self.counts[-1] + 1)
        shares = [self._shares_of(one, all_right, all_right) for one in rows]
        plain, *others = self._speeds(shares, batch)
        return max(others) > plain

    def _smallest(self) -> int:
        return next(count for count in self.counts if count)

    # --- trials ---

    def _is_trial_due(self, best: int) -> bool:
        """True where a trial is due: from drafts only now and then, since a step is short."""
        self._num_decided += 1
        return not best or self._num_decided % TRIAL_INTERVAL == 0

    def _may_meet(self, count: int, batch: int) -> bool:
        """True where a step of a K whose time was never seen in service can be paid for."""
        dearer = self.costs.step(count, batch) - self.costs.step(self.counts[0], batch)
        return self._exploration.can_pay(dearer)

    def _begin_trial(
        self, best: int, drafted: Sequence[Drafted], batch: int, needs_replay: bool
    ) -> None:
        """Try another K, if one could be better after all and there is budget for it."""
        self._exploration.limit(NUM_SAVED_STEPS * self.costs.step(self.counts[-1], batch))
        if not best and all(one.is_found for one in drafted):
            return  # plain steps judge the first of what was found: a trial would tell little more
        if not best and not self._could_pay(batch, drafted):
            return
        speeds = self._usual_speeds(drafted, batch)
        count = self._worth_a_trial(best, speeds)
        if count is None:
            return
        replay_ms = self.costs.replay(batch) if needs_replay or not count else 0.0
        worth = speeds[self.counts.index(count)] / self._best_speed
        dearer = self.costs.step(count, batch) * (1 - worth)
        num_steps = self.costs.num_until_compared(count)
        if not self._exploration.can_pay(num_steps * max(0.0, dearer) + replay_ms):
            return
        self._exploration.begin(count, sum(self.num_steps.values()), num_steps)
        if not count:
            self._exploration.pay(replay_ms)  # of the step after the trial

    def _worth_a_trial(self, best: int, speeds: Sequence[float]) -> int | None:
        """The K to try.

        From plain steps the fewest drafts.  Between other K it is the steps' times that may be
        wrong: of those that are near, the one not tried for longest.
        """
        if not best:
            return self._smallest()
        least = self._best_speed / RETRY_SPEEDUP
        near = [
            count
            for count, speed in zip(self.counts, speeds, strict=True)
            if count != best and speed > least
        ]
        return self._exploration.longest_untried(near)


def _num_accepted(
    count: int, one: Drafted, by_count: Sequence[float], usual: Sequence[float]
) -> float:
    """Tokens that a step of K = `count` gives a request beside its own, where `by_count[n]` of n
    drafts are accepted.

    K of a model has two ends, the drafts that are verified now and as many that are made for the
    next step, of which `usual[n]` are accepted: each is half of what it brings.  Where there are
    fewer now than K, because the step before had a smaller one, that lasts one step.
    """
    wanted = count if count < one.most else one.most
    if one.num_drafts is None:
        return by_count[wanted]
    there = one.num_drafts if one.num_drafts < wanted else wanted
    if one.is_found:
        return by_count[there]
    soon = by_count[wanted] - SHORTAGE * (by_count[wanted] - by_count[there])
    return (soon + usual[wanted]) / 2
