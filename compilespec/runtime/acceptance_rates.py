"""How often drafts were right lately, by their place in the step.

Rates decay by steps, not by drafts: with batch 8, a window of N drafts would cover only a few steps
and be noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

DECAY = 0.97  # weight of an older step's drafts against those of the one after it
IDLE_DECAY = 0.99  # the same, of places and levels that the steps of now do not reach: luck fades
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # acceptance of a draft that was never tried


class AcceptanceRates:
    """Acceptance by draft position, given those before were accepted; older steps weigh less.

    Args:
        max_drafts: the largest K.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._accepted = [0.0] * max_drafts
        self._tried = [0.0] * max_drafts
        self._expected: list[float] | None = None

    def learn(self, count: int, num_emitted: int, times: int, requests: float) -> None:
        """One request's step of K = `count`: drafts up to the first wrong one were tried.

        Args:
            times: how often it was so.
            requests: of a step, on average: that many `times` are one step.
        """
        self._expected = None
        age = times / requests
        kept = DECAY**age
        added = requests * (1 - kept) / (1 - DECAY)
        self.fade(age, count)
        for place in range(min(count, num_emitted)):
            self._tried[place] = kept * self._tried[place] + added
            self._accepted[place] *= kept
            if place < num_emitted - 1:
                self._accepted[place] += added

    def fade(self, num_steps: float, first: int = 0) -> None:
        """`num_steps` steps did not reach the places from `first` on."""
        self._expected = None
        idle = IDLE_DECAY**num_steps
        for place in range(first, len(self._tried)):
            self._tried[place] *= idle
            self._accepted[place] *= idle

    def rates(self, prior: Sequence[float] | None = None) -> list[float]:
        """Of draft 1, 2, ..., each given that those before it were accepted.

        Args: prior: what is believed of drafts that were never tried; None: as the one before.
        """
        rates, rate = [], PRIOR_RATE
        for place, (accepted, tried) in enumerate(zip(self._accepted, self._tried, strict=True)):
            believed = rate if prior is None else (prior[place] + (rate if place else prior[0])) / 2
            rate = (accepted + PRIOR_WEIGHT * believed) / (tried + PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    def expected(self) -> list[float]:
        """Accepted drafts of a step that verifies 0, 1, 2, ..."""
        if self._expected is None:
            self._expected = expected_accepted(self.rates())
        return self._expected


class LearntAcceptance:
    """`AcceptanceRates` by how sure the drafter was: levels of `passes/splice/evidence.py`.

    A level that was seldom seen, or not for long, is taken for the average of all: what it was
    worth in one text says little of the next.

    Args:
        max_drafts: the largest K.
    """

    def __init__(self, max_drafts: int) -> None:
        self.pooled = AcceptanceRates(max_drafts)
        self._levels: dict[int, AcceptanceRates] = {}
        self._num_steps = 0
        self._last_seen: dict[int, int] = {}  # by level, in steps
        self._expected: dict[int, list[float]] = {}  # by level, since something was learnt last
        self._usual: list[float] = []  # the pooled rates, since then
        self._noted: Counter[tuple[int, int, int]] = Counter()  # level, tried, right: how often

    def note(self, level: int, num_tried: int, num_right: int) -> None:
        """One request's drafts, `num_tried` of which could be judged; counts once it is learnt."""
        self._noted[level, num_tried, num_right] += 1

    def learn(self, num_steps: int) -> None:
        """From all that was noted, together: the order of a few steps says nothing.

        Args: num_steps: in which it was noted.
        """
        requests = max(1.0, self._noted.total() / num_steps)
        self._expected.clear()
        self._usual = []
        for (level, num_tried, num_right), times in self._noted.items():
            num_emitted = 1 + min(num_right, num_tried)
            self.pooled.learn(num_tried, num_emitted, times, requests)
            self._of(level).learn(num_tried, num_emitted, times, requests)
        self._num_steps += num_steps
        self._last_seen |= {level: self._num_steps for level, _, _ in self._noted}
        self._noted.clear()

    def expected(self, level: int) -> list[float]:
        """Accepted drafts of a step that verifies 0, 1, 2, ... of this level."""
        known = self._expected.get(level)
        if known is None:
            self._usual = self._usual or self.pooled.rates()
            known = expected_accepted(self._of(level).rates(self._usual))
            self._expected[level] = known
        return known

    def expected_of_all(self) -> list[float]:
        """The same over all levels."""
        return self.pooled.expected()

    def by_level(self) -> dict[int, list[float]]:
        """Rates by draft of the levels that were seen."""
        pooled = self.pooled.rates()
        return {level: self._of(level).rates(pooled) for level in sorted(self._levels)}

    def _of(self, level: int) -> AcceptanceRates:
        """Up to date."""
        if level not in self._levels:
            self._levels[level] = AcceptanceRates(self.pooled.max_drafts)
            self._last_seen[level] = self._num_steps
        unseen = self._num_steps - self._last_seen[level]
        if unseen:
            self._levels[level].fade(unseen)
            self._last_seen[level] = self._num_steps
        return self._levels[level]


def expected_accepted(rates: Sequence[float]) -> list[float]:
    """Accepted drafts of a step that verifies 0, 1, 2, ..."""
    totals, chance = [0.0], 1.0
    for rate in rates:
        chance *= rate
        totals.append(totals[-1] + chance)
    return totals
