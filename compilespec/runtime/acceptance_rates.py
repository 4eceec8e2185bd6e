"""How often drafts were right lately, by their place in the step."""

from __future__ import annotations

from collections.abc import Sequence

DECAY = 0.97  # weight of an older draft against the one after it
IDLE_DECAY = 0.99  # the same, a step, of places that the steps of now do not reach: bad luck fades
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # acceptance of a draft that was never tried


class AcceptanceRates:
    """Acceptance by draft position, given those before were accepted; older drafts weigh less.

    Args:
        max_drafts: the largest K.
    """

    def __init__(self, max_drafts: int) -> None:
        self._accepted = [0.0] * max_drafts
        self._tried = [0.0] * max_drafts
        self._expected: list[float] | None = None

    def learn(self, count: int, num_emitted: int) -> None:
        """One request's step of K = `count`: drafts up to the first wrong one were tried."""
        self._expected = None
        for place in range(count, len(self._tried)):
            self._tried[place] *= IDLE_DECAY
            self._accepted[place] *= IDLE_DECAY
        for place in range(min(count, num_emitted)):
            self._tried[place] = DECAY * self._tried[place] + 1
            self._accepted[place] = DECAY * self._accepted[place] + (place < num_emitted - 1)

    def rates(self) -> list[float]:
        """Of draft 1, 2, ..., each given that those before it were accepted."""
        rates, prior = [], PRIOR_RATE
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            prior = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
            rates.append(prior)
        return rates

    def expected(self) -> list[float]:
        """Accepted drafts of a step that verifies 0, 1, 2, ..."""
        if self._expected is None:
            rates = self.rates()
            self._expected = [expected_accepted(rates, n) for n in range(len(rates) + 1)]
        return self._expected


def expected_accepted(rates: Sequence[float], count: int) -> float:
    """Accepted drafts of a step that verifies `count`."""
    total, chance = 0.0, 1.0
    for rate in rates[:count]:
        chance *= rate
        total += chance
    return total
