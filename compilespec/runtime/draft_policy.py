"""How many drafts a step verifies: by what steps cost, and by how many drafts were right lately.

Nothing here changes a token: any K gives the tokens of plain decoding.  What it bounds is the loss:
time spent on finding out whether drafts pay again is limited to a part of the time that plain
steps took.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compilespec.program import PAD
from compilespec.runtime.executor import Executor

DECAY = 0.97  # weight of the last step's drafts against those of the step before
FORGET = 0.99  # the same of drafts further on than the steps of now go: bad luck must not stay
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # acceptance of a draft that was never tried
SPEED_UPDATE = 0.05  # weight of a step against what is known of the machine's speed
COST_UPDATE = 0.5  # weight of the first steps after a change of K against its known time
NUM_COST_STEPS = 3  # so many first steps; their median counts
MARGIN = 0.03  # another K must be better by so much
HOPE = 1.25  # a K is looked at again if it would win, were it faster by so much
EXPLORE_SHARE = 0.015  # of the time of steps, for looking again
FIRST_BUDGET = 8.0  # plain steps' worth of looking, before there was any
NUM_TRIAL_STEPS = 4
NUM_PLAIN_STEPS = 8  # plain steps that are decided at once


@dataclass(frozen=True, kw_only=True)
class Choice:
    """K of the next step, or steps, and why."""

    num_draft_tokens: int
    is_trial: bool = False  # to find out, against the estimate
    num_steps: int = 1


class StepCosts:
    """Milliseconds of a step by K and batch size: measured once, then kept up to date.

    The first times may have been taken while something else had the machine.  So a time far below
    the known one replaces it, and none is believed that is out of all proportion.

    Args:
        measured: by (K, batch size); a batch takes the next larger size that was measured.
        replay_ms: of one replay, by batch size; empty where none is needed.
    """

    def __init__(
        self, measured: Mapping[tuple[int, int], float], replay_ms: Mapping[int, float]
    ) -> None:
        self._counts = sorted({count for count, _ in measured})
        self._sizes = sorted({size for _, size in measured})
        self._size_of = [  # by batch size
            next(size for size in self._sizes if size >= batch)
            for batch in range(self._sizes[-1] + 1)
        ]
        self._ms = {
            size: {count: measured[count, size] for count in self._counts} for size in self._sizes
        }
        self._believed = {size: self._believe(size) for size in self._sizes}
        self._replay_ms = dict(replay_ms)
        self._unserved = set(measured)
        self._last = (-1, -1)  # K and size of the last step
        self._first_ratios: list[float] | None = None  # to its known time, of the first of a K

    @property
    def is_settled(self) -> bool:
        """Whether the next step tells of the machine alone, not of how K compare."""
        return self._first_ratios is None

    def step(self, count: int, batch: int) -> float:
        """No longer than one of a larger K, and than 2 K + 1 of the shortest."""
        return self._believed[self._bucket(batch)][count]

    def replay(self, batch: int) -> float:
        """It runs the drafter alone: no longer than a step of the largest K."""
        known = self._replay_ms.get(self._bucket(batch), 0.0)
        return min(known, self.step(self._counts[-1], batch))

    def is_served(self, count: int, batch: int) -> bool:
        """Whether a request has seen such a step."""
        return (count, self._bucket(batch)) not in self._unserved

    def update(self, count: int, batch: int, elapsed_ms: float) -> None:
        """A time far above the known one (a pause of the machine) counts as twice that.

        How the K compare is learnt where one follows another, from steps that are neighbours in
        time.  Later steps of the same K tell how fast the machine is now: they change the times of
        all K, or whichever is not in use would look fast whenever the machine is slow.
        """
        size = self._bucket(batch)
        known = self._ms[size]
        self._unserved.discard((count, size))
        last_count, last_size = self._last
        self._last = (count, size)
        if elapsed_ms < known[count] / 2:
            known[count] = elapsed_ms
        ratio = min(elapsed_ms / known[count], 2.0)
        if size != last_size:
            self._first_ratios = None
        elif count != last_count:
            self._first_ratios = []
        if self._first_ratios is None:
            for other in known:
                known[other] *= 1 + SPEED_UPDATE * (ratio - 1)
        else:
            self._first_ratios.append(ratio)
            if len(self._first_ratios) == NUM_COST_STEPS:
                known[count] *= 1 + COST_UPDATE * (statistics.median(self._first_ratios) - 1)
                self._first_ratios = None
        self._believed[size] = self._believe(size)

    def table(self) -> dict[str, float]:
        """For people: "K=2, batch 4" to milliseconds."""
        return {
            f"K={count}, batch {size}": round(self._ms[size][count], 3)
            for count in self._counts
            for size in self._sizes
        }

    def _believe(self, size: int) -> dict[int, float]:
        known, least = self._ms[size], min(self._ms[size].values())
        believed, bound = {}, math.inf
        for count in reversed(self._counts):
            bound = min(bound, known[count])
            believed[count] = min(bound, (2 * count + 1) * least)
        return believed

    def _bucket(self, batch: int) -> int:
        return self._size_of[batch] if batch < len(self._size_of) else self._sizes[-1]


class DraftPolicy:
    """Chooses K for every step.

    Args:
        counts: the K that there are graphs for, at least two, in rising order.
        costs: what a step of each takes.
    """

    def __init__(self, counts: Sequence[int], costs: StepCosts) -> None:
        self.counts = tuple(counts)
        self.costs = costs
        self._accepted = [0.0] * self.counts[-1]  # by draft position, older ones weigh less
        self._tried = [0.0] * self.counts[-1]
        self._expected: list[float] | None = None  # accepted of 0, 1, ... drafts, by `rates`
        self._current = self.counts[-1]
        self._trial, self._trial_steps = 0, 0  # K that is looked at, and for how many steps more
        self._looked_at = dict.fromkeys(self.counts, 0)  # when: in steps
        self._best_speed = 0.0  # tokens a millisecond of the K that seemed best
        self._budget_ms = FIRST_BUDGET * costs.step(self.counts[0], 1)
        self.num_steps = dict.fromkeys(self.counts, 0)

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
        if self._trial_steps:
            self._trial_steps *= bool(drafted) and self._trial != best
        elif drafted and self._may_look(best, drafted, batch, needs_replay):
            self._trial_steps = NUM_TRIAL_STEPS
        if self._trial_steps:
            self._trial_steps -= 1
            return Choice(num_draft_tokens=self._trial, is_trial=True)
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
            self._budget_ms += EXPLORE_SHARE * elapsed_ms
        else:
            tokens = batch + sum(emitted) - len(emitted)
            self._budget_ms -= max(0.0, elapsed_ms - tokens / self._best_speed)
        for num_emitted in emitted if count else ():
            self._learn(count, num_emitted)

    def pass_over(self, elapsed_ms: float) -> None:
        """A plain step that was decided with others: nothing is learnt from it."""
        self.num_steps[0] += 1
        self._budget_ms += EXPLORE_SHARE * elapsed_ms

    def may_keep_warm(self, batch: int) -> bool:
        """Whether rows whose kept inputs would be lost are worth a replay now; pays for it."""
        cost = self.costs.replay(batch)
        dearer = self.costs.step(self._smallest(), batch) - self.costs.step(0, batch)
        looking = NUM_TRIAL_STEPS * max(0.0, dearer)
        if not self._can_pay(batch) or self._budget_ms < cost + looking / 2:
            return False  # the looking itself comes first
        self._budget_ms -= cost
        return True

    def pay_replay(self, batch: int) -> None:
        """A replay before a trial belongs to the trial's cost."""
        self._budget_ms -= self.costs.replay(batch)

    def rates(self) -> list[float]:
        """Acceptance of draft 1, 2, ..., given those before it were accepted."""
        rates, prior = [], PRIOR_RATE
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            prior = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
            rates.append(prior)
        return rates

    def describe(self) -> dict[str, object]:
        """For `Engine.plan()`."""
        return {
            "counts": self.counts,
            "acceptance_by_position": [round(rate, 3) for rate in self.rates()],
            "step_ms": self.costs.table(),
            "num_steps": dict(self.num_steps),
        }

    def _best(self, drafted: Sequence[int], batch: int) -> int:
        """The K of most tokens a millisecond; the one in use, unless another is clearly better."""
        expected = self._expected_now()
        speeds = {count: self._speed(count, drafted, batch, expected) for count in self.counts}
        best = max(speeds, key=lambda count: speeds[count])
        if speeds[best] > (1 + MARGIN) * speeds[self._current]:
            self._current = best
        self._best_speed = speeds[self._current]
        return self._current

    def _speed(
        self, count: int, drafted: Sequence[int], batch: int, expected: Sequence[float]
    ) -> float:
        """Tokens a millisecond, where `expected[n]` of n drafts are accepted."""
        return self._tokens(count, drafted, batch, expected) / self.costs.step(count, batch)

    def _tokens(
        self, count: int, drafted: Sequence[int], batch: int, expected: Sequence[float]
    ) -> float:
        return batch + sum(expected[min(count, most)] for most in drafted)

    def _expected_now(self) -> list[float]:
        if self._expected is None:
            rates = self.rates()
            self._expected = [expected_accepted(rates, n) for n in range(self.counts[-1] + 1)]
        return self._expected

    def _may_meet(self, count: int, batch: int) -> bool:
        """Whether a step of a K whose time was never seen in service can be paid for."""
        dearer = self.costs.step(count, batch) - self.costs.step(self.counts[0], batch)
        return self._budget_ms >= dearer

    def _may_look(self, best: int, drafted: Sequence[int], batch: int, needs_replay: bool) -> bool:
        """Whether another K could be better after all, and enough steps went by to look at it."""
        count = self._hopeful(best, drafted, batch)
        if count is None:
            return False
        replay_ms = self.costs.replay(batch) if needs_replay or not count else 0.0
        tokens = self._tokens(count, drafted, batch, self._expected_now())
        dearer = self.costs.step(count, batch) - tokens / self._best_speed
        if self._budget_ms < NUM_TRIAL_STEPS * max(0.0, dearer) + replay_ms:
            return False
        self._trial, self._looked_at[count] = count, sum(self.num_steps.values())
        if not count:
            self._budget_ms -= replay_ms  # of the step after the trial
        return True

    def _hopeful(self, best: int, drafted: Sequence[int], batch: int) -> int | None:
        """The K to look at.

        From plain steps the fewest drafts, if right ones would pay.  Between other K it is the
        steps' times that may be wrong: of those that are near, the one not looked at for longest.
        """
        if not best:
            return self._smallest() if self._can_pay(batch, drafted) else None
        expected, least = self._expected_now(), self._best_speed / HOPE
        near = [
            count
            for count in self.counts
            if count != best and self._speed(count, drafted, batch, expected) > least
        ]
        return min(near, key=lambda count: self._looked_at[count], default=None)

    def _can_pay(self, batch: int, drafted: Sequence[int] | None = None) -> bool:
        """Whether drafts that are all right would beat plain steps."""
        rows = [self.counts[-1]] * batch if drafted is None else drafted
        all_right = range(self.counts[-1] + 1)
        plain = self._speed(self.counts[0], rows, batch, all_right)
        return any(self._speed(k, rows, batch, all_right) > plain for k in self.counts[1:])

    def _smallest(self) -> int:
        return next(count for count in self.counts if count)

    def _learn(self, count: int, num_emitted: int) -> None:
        """Drafts up to the first wrong one were tried; of those past K less and less is known."""
        self._expected = None
        for place in range(count, len(self._tried)):
            self._tried[place] *= FORGET
            self._accepted[place] *= FORGET
        for place in range(min(count, num_emitted)):
            self._tried[place] = DECAY * self._tried[place] + 1
            self._accepted[place] = DECAY * self._accepted[place] + (place < num_emitted - 1)


def measure(executor: Executor, *, num_times: int = 3) -> StepCosts:
    """Time the steps of every K, at batch sizes 1, 2, 4, ..., on padded rows: they change nothing.

    What attention costs is not in these times; `StepCosts.update` brings it in.
    """
    sizes = executor.geometry
    batches = [size for size in (2**i for i in range(20)) if size < sizes.max_batch_size]
    batches.append(sizes.max_batch_size)

    def fastest(run: Callable[[], object]) -> float:
        run()  # what is set up on first use
        times = []
        for _ in range(num_times):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
        return min(times)

    steps, replays = {}, {}
    for batch in batches:
        rows = [PAD] * batch
        for count in (*sizes.draft_counts, sizes.num_draft_tokens):
            steps[count, batch] = fastest(functools.partial(_run_step, executor, rows, count))
        if sizes.needs_replay:
            replays[batch] = fastest(functools.partial(executor.replay, rows, [0] * batch))
    return StepCosts(steps, replays)


def _run_step(executor: Executor, rows: Sequence[int], count: int) -> None:
    executor.collect(executor.launch_decode(rows, count))


def expected_accepted(rates: Sequence[float], count: int) -> float:
    """Accepted drafts of a step that verifies `count`."""
    total, chance = 0.0, 1.0
    for rate in rates[:count]:
        chance *= rate
        total += chance
    return total
