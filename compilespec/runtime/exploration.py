"""Steps of a K that is not believed to be the best, to find out; and what they may cost.

What is spent is bounded by a share of the time of other steps.
"""

from __future__ import annotations

from collections.abc import Sequence

TIME_SHARE = 0.01  # of the time of steps, for trials
FIRST_BUDGET_STEPS = 16.0  # plain steps' worth of trials, before there was any step


class Exploration:
    """The budget for trials, the one that goes on, and when each K was last tried.

    Args:
        counts: the K that there are.
        plain_step_ms: what a step of the smallest K takes.
    """

    def __init__(self, counts: Sequence[int], plain_step_ms: float) -> None:
        self._budget_ms = FIRST_BUDGET_STEPS * plain_step_ms
        self._trial, self._steps_left = 0, 0
        self._last_trial = dict.fromkeys(counts, 0)  # by K: number of the step it began at

    def earn(self, elapsed_ms: float) -> None:
        """A step that was no trial went by."""
        self._budget_ms += TIME_SHARE * elapsed_ms

    def pay(self, ms: float) -> None:
        """Time that a trial took beyond what its tokens are worth."""
        self._budget_ms -= max(0.0, ms)

    def limit(self, ms: float) -> None:
        """Keep no more than this: what was set aside when times seemed longer is not spent."""
        self._budget_ms = min(self._budget_ms, ms)

    def can_pay(self, ms: float) -> bool:
        return self._budget_ms >= ms

    def begin(self, count: int, step: int, num_steps: int) -> None:
        """Try K = `count` for `num_steps` steps from the `step`-th on."""
        self._trial, self._last_trial[count] = count, step
        self._steps_left = num_steps

    def stop_unless(self, is_wanted: bool, best: int) -> None:
        """End the trial if nobody drafts, or its K has become the one that is in use."""
        if not is_wanted or self._trial == best:
            self._steps_left = 0

    @property
    def is_trying(self) -> bool:
        return self._steps_left > 0

    def next_step(self) -> int:
        """K of the trial's next step."""
        self._steps_left -= 1
        return self._trial

    def longest_untried(self, counts: Sequence[int]) -> int | None:
        """Of these K the one whose last trial is longest ago; None: there is none."""
        return min(counts, key=lambda count: self._last_trial[count], default=None)
