"""How many drafts a step verifies: by what steps cost, and by how many drafts were right lately.

Nothing here changes a token: any K gives the tokens of plain decoding.  What it bounds is the loss:
time spent on finding out whether drafts pay again is limited to a part of the time that plain
steps took.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compilespec.program import PAD
from compilespec.runtime.executor import Executor

DECAY = 0.97  # weight of the last step's drafts against those of the step before
FORGET = 0.99  # the same of drafts further on than the steps of now go: bad luck must not stay
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # acceptance of a draft that was never tried
COST_UPDATE = 0.05  # weight of a measured time against the one known
SHARED_UPDATE = 0.8  # part of it that holds for the other K, too: the machine, or the context
MARGIN = 0.03  # another K must be better by so much
EXPLORE_SHARE = 0.02  # of the time of steps, for looking again
FIRST_BUDGET = 8.0  # plain steps' worth of looking, before there was any
NUM_TRIAL_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """K of the next step, and why."""

    num_draft_tokens: int
    is_trial: bool = False  # to find out, against the estimate


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

        Most of a change is taken to be one of all K: else whichever K is not in use would look fast
        whenever the machine is slow.
        """
        size = self._bucket(batch)
        known = self._ms[size]
        self._unserved.discard((count, size))
        if elapsed_ms < known[count] / 2:
            known[count] = elapsed_ms
        change = COST_UPDATE * (min(elapsed_ms / known[count], 2.0) - 1)
        for other in known:
            known[other] *= 1 + change * (1.0 if other == count else SHARED_UPDATE)
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
        self._trial_steps = 0
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
        if best:
            self._trial_steps = 0
        elif self._trial_steps or self._may_try(drafted, batch, needs_replay):
            self._trial_steps = (self._trial_steps or NUM_TRIAL_STEPS + 1) - 1
            if self._trial_steps:
                return Choice(num_draft_tokens=self._smallest(), is_trial=True)
        return Choice(num_draft_tokens=best)

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
            gained = sum(emitted) - len(emitted)
            plain_ms = self.costs.step(self.counts[0], batch)
            self._budget_ms -= max(0.0, elapsed_ms - plain_ms * (1 + gained / max(1, batch)))
        for num_emitted in emitted if count else ():
            self._learn(count, num_emitted)

    def may_keep_warm(self, batch: int) -> bool:
        """Whether rows whose kept inputs would be lost are worth a replay now; pays for it."""
        cost = self.costs.replay(batch)
        if not self._can_pay(batch) or self._budget_ms < cost + self._trial_ms(batch) / 2:
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
        if self._expected is None:
            rates = self.rates()
            self._expected = [expected_accepted(rates, n) for n in range(self.counts[-1] + 1)]
        expected = self._expected
        speeds = {count: self._speed(count, drafted, batch, expected) for count in self.counts}
        best = max(speeds, key=lambda count: speeds[count])
        if speeds[best] > (1 + MARGIN) * speeds[self._current]:
            self._current = best
        return self._current

    def _speed(
        self, count: int, drafted: Sequence[int], batch: int, expected: Sequence[float]
    ) -> float:
        """Tokens a millisecond, where `expected[n]` of n drafts are accepted."""
        tokens = batch + sum(expected[min(count, most)] for most in drafted)
        return tokens / self.costs.step(count, batch)

    def _may_meet(self, count: int, batch: int) -> bool:
        """Whether a step of a K whose time was never seen in service can be paid for."""
        dearer = self.costs.step(count, batch) - self.costs.step(self.counts[0], batch)
        return self._budget_ms >= dearer

    def _may_try(self, drafted: Sequence[int], batch: int, needs_replay: bool) -> bool:
        """Whether drafts could pay at all, and enough plain steps went by to look."""
        cost = self._trial_ms(batch) + needs_replay * self.costs.replay(batch)
        return bool(drafted) and self._budget_ms >= cost and self._can_pay(batch, drafted)

    def _trial_ms(self, batch: int) -> float:
        """What looking takes more than plain steps."""
        dearer = self.costs.step(self._smallest(), batch) - self.costs.step(0, batch)
        return NUM_TRIAL_STEPS * max(0.0, dearer)

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
