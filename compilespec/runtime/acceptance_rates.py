"""How often drafts were right lately, by their place in the step and by how sure they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DECAY = 0.97  # weight of a step's drafts against those of the step after it: 0.4%, 3% in new texts
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # of a draft that was never tried, in drafts: 0.1%, worst 8%


class JudgedDrafts(NamedTuple):
    """A request's drafts, after a step."""

    num_tried: int  # drafts that could be judged, one more than were verified where that one is
    num_right: int  # of these, before the first wrong one
    level: int = 0  # how sure they were: levels of `passes/splice/evidence.py`


class AcceptanceRates:
    """Acceptance by draft position, given those before were accepted; older steps weigh less.

    A level that was seldom seen, or not for long, is taken for the average of all: what it was
    worth in one text says little of the next.

    Args:
        max_drafts: the largest K.
    """

    def __init__(self, max_drafts: int) -> None:
        self._num_tried = defaultdict[int | None, list[float]](lambda: [0.0] * max_drafts)
        self._num_right = defaultdict[int | None, list[float]](lambda: [0.0] * max_drafts)
        self._expected: dict[int, list[float]] = {}  # by level, since something was learnt last

    def learn(self, noted: Mapping[JudgedDrafts, int], num_steps: int) -> None:
        """Learn from a few steps together.

        Args:
            noted: how often each outcome came.
            num_steps: in which it was noted.
        """
        kept = DECAY**num_steps
        for by_level in (self._num_tried, self._num_right):
            for level, weights in by_level.items():
                by_level[level] = [kept * weight for weight in weights]
        for (num_tried, num_right, own_level), times in noted.items():
            for level in (None, own_level):
                for place in range(min(num_tried, num_right + 1)):
                    self._num_tried[level][place] += times
                    self._num_right[level][place] += times * (place < num_right)
        self._expected.clear()

    def rates(self, level: int | None = None) -> list[float]:
        """Of draft 1, 2, ..., each given that those before it were accepted; None: of all levels.

        A draft that was seldom tried is believed to be as good as the one before it, and one of a
        level halfway between that and the average of all.
        """
        usual = None if level is None else self.rates()
        rates, rate = [], PRIOR_RATE if usual is None else usual[0]
        counts = zip(self._num_tried[level], self._num_right[level], strict=True)
        for place, (num_tried, num_right) in enumerate(counts):
            believed = rate if usual is None else (usual[place] + rate) / 2
            rate = (num_right + PRIOR_WEIGHT * believed) / (num_tried + PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    def expected(self, level: int) -> list[float]:
        """Accepted drafts of a step that verifies 0, 1, 2, ... of this level."""
        if level not in self._expected:
            self._expected[level] = expected_accepted(self.rates(level))
        return self._expected[level]

    def by_level(self) -> dict[int, list[float]]:
        """Rates by draft of the levels that were seen."""
        levels = [one for one in self._num_tried if one is not None and any(self._num_tried[one])]
        return {level: self.rates(level) for level in sorted(levels)}


def expected_accepted(rates: Sequence[float]) -> list[float]:
    """Accepted drafts of a step that verifies 0, 1, 2, ..."""
    totals, chance = [0.0], 1.0
    for rate in rates:
        chance *= rate
        totals.append(totals[-1] + chance)
    return totals
