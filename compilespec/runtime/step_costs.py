"""What a verify step takes by K and batch size: measured at the start, then kept up to date."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from compilespec.program import PAD
from compilespec.runtime.executor import Executor

SPEED_WEIGHT = 0.05  # of one step, against what is known of the machine's speed
COMPARISON_WEIGHT = 0.3  # of two K that followed each other, against what was known of them
NUM_COMPARED_STEPS = 3  # steps behind the cold ones, whose median counts
NUM_COLD_STEPS, NUM_COLD_PLAIN_STEPS = 1, 4  # first steps behind another K that do not count
NUM_NEAR_STEPS = 16  # of a K, at most, if the one that follows it is compared with it
MEASURE_SECONDS, MAX_ROUNDS = 0.5, 10  # at the start, steps are timed again until then
NUM_IN_A_ROW, IN_A_ROW_SECONDS = (
    8,
    0.01,
)  # then too: of one K: at most this many steps, for at most this long


class StepCosts:
    """Milliseconds of a step by K and batch size: measured once, then kept up to date.

    The first times may have been taken while something else had the machine.  So a time far below
    the known one replaces it, and none is believed that is out of all proportion.

    To each comes what the host does between two steps, which is learnt in service: it is the same
    for every K, so that short steps are worth less than their own times say.

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
        self._slowness = dict.fromkeys(self._sizes, 1.0)  # all times of a size, to those above
        self._host_ms = dict.fromkeys(self._sizes, 0.0)  # between two steps
        self._replay_ms = dict(replay_ms)
        self._unserved = {size: list(self._counts) for size in self._sizes}
        self._last = (-1, -1)  # K and batch of the last step
        self._num_in_a_row = 0  # steps of this K
        self._first_ratios: list[float] | None = None  # to its known time, of the first of them
        self._median: float | None = None  # of those that are compared
        self._before: tuple[int, float] | None = None  # the K before, if it is near, and its median

    @property
    def is_settled(self) -> bool:
        """True where the next step tells of the machine alone, not of how K compare."""
        return self._first_ratios is None

    def step(self, count: int, batch: int) -> float:
        """No longer than one of a larger K, and than 2 K + 1 of the shortest."""
        size = self._bucket(batch)
        own_ms = self._believed[size][self._counts.index(count)] * self._slowness[size]
        return own_ms + self._host_ms[size]

    def host(self, batch: int) -> float:
        """Milliseconds of the host between two steps."""
        return self._host_ms[self._bucket(batch)]

    def at_usual_speed(self, batch: int) -> tuple[float, ...]:
        """`step` of every K, in rising order, over `slowness`: how they compare."""
        size = self._bucket(batch)
        host_ms = self._host_ms[size] / self._slowness[size]
        return tuple([ms + host_ms for ms in self._believed[size]])

    def slowness(self, batch: int) -> float:
        """What all steps of this size take longer now than `at_usual_speed`."""
        return self._slowness[self._bucket(batch)]

    def replay(self, batch: int) -> float:
        """It runs the drafter alone: no longer than a step of the largest K."""
        known = self._replay_ms.get(self._bucket(batch), 0.0)
        return min(known, self.step(self._counts[-1], batch))

    def unserved(self, batch: int) -> Sequence[int]:
        """The K of which no request has seen a step."""
        return self._unserved[self._bucket(batch)]

    def update(
        self, count: int, batch: int, elapsed_ms: float, *, behind_prefill: bool = False
    ) -> None:
        """A time far above the known one (a pause of the machine) counts as twice that.

        How the K compare is learnt where a few steps of one are followed by another: they are
        neighbours in time and of one batch, since those of one size differ, and the contexts of
        their requests are nearly as long.  Later steps of the same K tell how fast the machine is
        now: they change the times of all K, or whichever is not in use would look fast whenever
        the machine is slow, or the contexts long.  The first steps after a change do not count:
        what the other K left in the CPU's caches makes them slower, plain ones most and for
        longest.  For the same reason a K behind a prefill is not compared at all.
        """
        size = self._bucket(batch)
        unserved, slowness = self._unserved[size], self._slowness[size]
        if unserved and count in unserved:
            unserved.remove(count)
        ratio = elapsed_ms / (self._ms[size][count] * slowness)
        if ratio < 1 / 2:
            slowness /= min(max(slowness, 1.0), 1 / ratio)
            self._set(count, size, elapsed_ms / slowness)
            ratio = 1.0
        elif ratio > 2:
            ratio = 2.0
        if (count, batch) != self._last or behind_prefill:
            self._begin_row(count, batch, is_near=batch == self._last[1] and not behind_prefill)
        self._num_in_a_row += 1
        if self._first_ratios is None:
            self._slowness[size] = slowness * (1 + SPEED_WEIGHT * (ratio - 1))
            return
        self._slowness[size] = slowness
        self._first_ratios.append(ratio)
        if len(self._first_ratios) == self.num_until_compared(count):
            self._median = statistics.median(self._first_ratios[-NUM_COMPARED_STEPS:])
            self._first_ratios = None
            if self._before is not None:
                other, ratio = self._before
                factor = 1 + COMPARISON_WEIGHT * (ratio / self._median - 1)
                self._set(other, size, factor * self._ms[size][other])

    def _begin_row(self, count: int, batch: int, *, is_near: bool) -> None:
        """Another K, which is compared with the last one if it is near: of the same batch, and not
        behind a prefill.
        """
        self._before, self._first_ratios = None, None
        if is_near:
            self._first_ratios = []
            if self._median is not None and self._num_in_a_row <= NUM_NEAR_STEPS:
                self._before = (self._last[0], self._median)
        self._last, self._num_in_a_row, self._median = (count, batch), 0, None

    def num_until_compared(self, count: int) -> int:
        """Steps of a K in a row after which its time is compared with what was known."""
        return NUM_COMPARED_STEPS + (NUM_COLD_STEPS if count else NUM_COLD_PLAIN_STEPS)

    def note_host(self, batch: int, ms: float) -> None:
        """What the host took between two steps; one that waited for somebody counts as a step of
        the smallest K, at most.
        """
        size = self._bucket(batch)
        most = self._believed[size][0] * self._slowness[size]
        self._host_ms[size] += SPEED_WEIGHT * (min(ms, most) - self._host_ms[size])

    def _set(self, count: int, size: int, ms: float) -> None:
        self._ms[size][count] = ms
        self._believed[size] = self._believe(size)

    def table(self) -> dict[str, float]:
        """For people: "K=2, batch 4" to milliseconds."""
        return {
            f"K={count}, batch {size}": round(self._ms[size][count] * self._slowness[size], 3)
            for count in self._counts
            for size in self._sizes
        }

    def _believe(self, size: int) -> tuple[float, ...]:
        """What is known by K, in rising order, but for times that cannot be: one above a larger K's
        lies between it and the shortest.
        """
        known, least, first = self._ms[size], min(self._ms[size].values()), self._counts[0]
        believed: list[float] = []
        larger, bound = self._counts[-1], math.inf
        for count in reversed(self._counts):
            ms = known[count]
            if ms > bound:
                ms = least + (bound - least) * (count - first) / (larger - first)
            believed.append(min(ms, (2 * count + 1) * least))
            larger, bound = count, ms
        return tuple(reversed(believed))

    def _bucket(self, batch: int) -> int:
        return self._size_of[batch] if batch < len(self._size_of) else self._sizes[-1]


def measure(executor: Executor, *, num_times: int = 3) -> StepCosts:
    """Time the steps of every K, at batch sizes 1, 2, 4, ..., on padded rows: they change nothing.

    All take turns, at least `num_times`, so that a pause of the machine makes no K look slow; in
    its turn a short step runs several times, as it does in service, since the first ones after
    another K are slower (a plain step of 2 ms by a fifth, one of K = 1 not at all).  The fastest
    time of each counts.  What attention costs is not in these times; `StepCosts.update` brings it
    in.
    """
    sizes = executor.geometry
    batches = [size for size in (2**i for i in range(20)) if size < sizes.config.max_batch_size]
    batches.append(sizes.config.max_batch_size)
    runs: dict[tuple[int, int], Callable[[], object]] = {}
    for batch in batches:
        rows = [PAD] * batch
        for count in sizes.config.draft_counts:
            runs[count, batch] = functools.partial(_run_step, executor, rows, count)
        if sizes.needs_catch_up:
            runs[_REPLAY, batch] = functools.partial(executor.catch_up, rows, [0] * batch)
    fastest = dict.fromkeys(runs, math.inf)
    for run in runs.values():
        run()  # what is set up on first use
    started, num_rounds = time.perf_counter(), 0
    while num_rounds < num_times or _goes_on(started, num_rounds):
        num_rounds += 1
        for key, run in runs.items():
            fastest[key] = min(fastest[key], _fastest_in_a_row(run) * 1e3)
    replays = {batch: ms for (count, batch), ms in fastest.items() if count == _REPLAY}
    steps = {key: ms for key, ms in fastest.items() if key[0] != _REPLAY}
    return StepCosts(steps, replays)


_REPLAY = -1  # in the place of a K


def _goes_on(started: float, num_rounds: int) -> bool:
    return num_rounds < MAX_ROUNDS and time.perf_counter() - started < MEASURE_SECONDS


def _fastest_in_a_row(run: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    ends = [time.perf_counter()]
    while len(ends) <= NUM_IN_A_ROW and ends[-1] - ends[0] < IN_A_ROW_SECONDS:
        run()
        ends.append(time.perf_counter())
    return min(after - before for before, after in itertools.pairwise(ends))


def _run_step(executor: Executor, rows: Sequence[int], count: int) -> None:
    executor.collect(executor.launch_decode(rows, count))
