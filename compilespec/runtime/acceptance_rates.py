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
    confidence: int = 0  # how sure they were: confidences of `passes/splice/evidence.py`


class AcceptanceRates:
    """Acceptance by draft position, given those before were accepted; older steps weigh less.

    A confidence that was seldom seen, or not for long, is taken for the average of all: what it was
    worth in one text says little of the next.

    Args:
        max_drafts: the largest K.
    """

    def __init__(self, max_drafts: int) -> None:
        self._num_tried = defaultdict[int | None, list[float]](lambda: [0.0] * max_drafts)
        self._num_right = defaultdict[int | None, list[float]](lambda: [0.0] * max_drafts)
        self._expected: dict[int, list[float]] = {}  # by confidence, since the last `learn`

    def learn(self, noted: Mapping[JudgedDrafts, int], num_steps: int) -> None:
        """Learn from a few steps together.

        Args:
            noted: how often each outcome came.
            num_steps: in which it was noted.
        """
        kept = DECAY**num_steps
        for by_confidence in (self._num_tried, self._num_right):
            for confidence, weights in by_confidence.items():
                by_confidence[confidence] = [kept * weight for weight in weights]
        for (num_tried, num_right, own_confidence), times in noted.items():
            for confidence in (None, own_confidence):
                for place in range(min(num_tried, num_right + 1)):
                    self._num_tried[confidence][place] += times
                    self._num_right[confidence][place] += times * (place < num_right)
        self._expected.clear()

    def rates(self, confidence: int | None = None) -> list[float]:
        """Of draft 1, 2, ..., each given that those before it were accepted; None: of all.

        A draft that was seldom tried is believed to be as good as the one before it, and one of a
        confidence halfway between that and the average of all.
        """
        usual = None if confidence is None else self.rates()
        rates, rate = [], PRIOR_RATE if usual is None else usual[0]
        counts = zip(self._num_tried[confidence], self._num_right[confidence], strict=True)
        for place, (num_tried, num_right) in enumerate(counts):
            believed = rate if usual is None else (usual[place] + rate) / 2
            rate = (num_right + PRIOR_WEIGHT * believed) / (num_tried + PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    def expected(self, confidence: int) -> list[float]:
        """Accepted drafts of a step that verifies 0, 1, 2, ... of this confidence."""
        if confidence not in self._expected:
            self._expected[confidence] = expected_accepted(self.rates(confidence))
        return self._expected[confidence]

    def by_confidence(self) -> dict[int, list[float]]:
        """Rates by draft of the confidences that were seen."""
        seen = [one for one, tried in self._num_tried.items() if one is not None and any(tried)]
        return {confidence: self.rates(confidence) for confidence in sorted(seen)}


def expected_accepted(rates: Sequence[float]) -> list[float]:
    """Accepted drafts of a step that verifies 0, 1, 2, ..."""
    totals, chance = [0.0], 1.0
    for rate in rates:
        chance *= rate
        totals.append(totals[-1] + chance)
    return totals
