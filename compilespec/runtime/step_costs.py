"""The time of a verify step by K and batch size: measured at the start, then kept up to date."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from compilespec.program import PAD
from compilespec.runtime.executor import Executor

SPEED_WEIGHT = 0.05  # of one step's news of the machine's speed: 0.6%, with noisy times 1.1%
OWN_WEIGHT = 0.02  # and of its K: 0.6%, with noisy times 1.2%
TURN_SECONDS = 0.01  # at the start a K runs for so long, then the next one


class StepCosts:
    """Milliseconds of a step by K and batch size.

    A step tells how fast the machine is now, which changes the times of all K, and how its K
    compares with the others, which it changes less: with one weight for both, a K that is not in
    use would look fast whenever the machine is slow, or the contexts long.

    Args:
        measured: by (K, batch size); a batch takes the next larger size that was measured.
        replay_ms: of one replay, by batch size; empty where none is needed.
    """

    def __init__(
        self, measured: Mapping[tuple[int, int], float], replay_ms: Mapping[int, float]
    ) -> None:
        self._measured, self._replay_ms = measured, replay_ms
        self._counts = sorted({count for count, _ in measured})
        self._sizes = sorted({size for _, size in measured})
        self._ms = {size: {k: measured[k, size] for k in self._counts} for size in self._sizes}
        self._doubtful = {size: self._beyond_belief(size) for size in self._sizes}

    def step(self, count: int, batch: int) -> float:
        return self._ms[self._bucket(batch)][count]

    def steps(self, batch: int) -> Collection[float]:
        """`step` of every K, in rising order."""
        return self._ms[self._bucket(batch)].values()

    def replay(self, batch: int) -> float:
        """It runs the drafter alone: no longer than a step of the largest K."""
        known = self._replay_ms.get(self._bucket(batch), 0.0)
        return min(known, self.step(self._counts[-1], batch))

    def doubtful(self, batch: int) -> Sequence[int]:
        """The K to see a step of: their times cannot be right, the machine was busy meanwhile."""
        return self._doubtful[self._bucket(batch)]

    def _beyond_belief(self, size: int) -> list[int]:
        """A step of K takes at most K + 1 of the shortest, and no more than one of a larger K."""
        known = self._ms[size]
        most = {k: (k + 1) * min(known.values()) for k in known}
        larger = {k: [known[other] for other in known if other > k] for k in known}
        return [k for k, ms in known.items() if ms > min([most[k], *larger[k]])]

    def update(self, count: int, batch: int, elapsed_ms: float) -> None:
        """Learn from a step.  A time far above the known one (a pause of the machine) counts as
        twice that.  One far below it replaces it, and others are no longer believed to be slow.
        """
        size = self._bucket(batch)
        known = self._ms[size]
        if count in self._doubtful[size]:
            self._doubtful[size].remove(count)
        ratio = min(elapsed_ms / known[count], 2.0)
        if ratio < 1 / 2:
            for other, ms in known.items():
                known[other] = max(ratio * ms, min(ms, self._measured[other, size]))
            known[count] = elapsed_ms
            self._doubtful[size] = [k for k in self._beyond_belief(size) if k != count]
        else:
            for other in known:
                known[other] *= 1 + SPEED_WEIGHT * (ratio - 1)
            known[count] *= 1 + OWN_WEIGHT * (ratio - 1)

    def table(self) -> dict[str, float]:
        """For people: "K=2, batch 4" to milliseconds."""
        return {
            f"K={count}, batch {size}": round(self.step(count, size), 3)
            for count in self._counts
            for size in self._sizes
        }

    def _bucket(self, batch: int) -> int:
        return next((size for size in self._sizes if size >= batch), self._sizes[-1])


def measure(executor: Executor, *, num_times: int = 3) -> StepCosts:
    """Time the steps of every K, at batch sizes 1, 2, 4, ..., on padded rows: they change nothing.

    All take turns, so that a pause of the machine makes no K look slow; in its turn a short step
    runs several times, since the first ones after another K are slower.  The fastest time counts.
    """
    sizes = executor.geometry
    batches = [size for size in (2**i for i in range(20)) if size < sizes.config.max_batch_size]
    batches.append(sizes.config.max_batch_size)
    counts = [*sizes.config.draft_counts, *([None] if sizes.needs_catch_up else [])]

    def run(count: int | None, batch: int) -> None:
        rows = [PAD] * batch
        if count is None:
            executor.catch_up(rows, [0] * batch)
        else:
            executor.collect(executor.launch_decode(rows, count))

    fastest = dict.fromkeys(itertools.product(counts, batches), math.inf)
    for key in fastest:
        run(*key)  # what is set up on first use
    for _ in range(num_times):
        for key in fastest:
            fastest[key] = min(fastest[key], _fastest_in_a_row(functools.partial(run, *key)) * 1e3)
    replays = {batch: ms for (count, batch), ms in fastest.items() if count is None}
    steps = {(count, batch): ms for (count, batch), ms in fastest.items() if count is not None}
    return StepCosts(steps, replays)


def _fastest_in_a_row(run: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    began = before = time.perf_counter()
    fastest = math.inf
    while before - began < TURN_SECONDS:
        run()
        now = time.perf_counter()
        fastest, before = min(fastest, now - before), now
    return fastest
