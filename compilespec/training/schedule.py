"""The learning rate, and the end of a run."""

from __future__ import annotations

from dataclasses import dataclass

from compilespec.training.options import TrainOptions


@dataclass(kw_only=True)
class Schedule:
    """Rises, stays, falls to zero.  `end` is open until the run's end is known; from then on the
    rates follow from the step alone, so a resumed run has the same ones.
    """

    end: int | None = None
    num_decay: int = 0

    def factor(self, step: int, warmup_steps: int) -> float:
        """The learning rate of a step, relative to the highest one."""
        rising = min(1.0, (step + 1) / warmup_steps)
        if self.end is None:
            return rising
        return max(0.0, min(rising, (self.end - step) / max(1, self.num_decay)))

    def update(self, step: int, seconds: float, options: TrainOptions, *, finish: bool) -> None:
        """Fix the end once it is known: by the number of steps, the minutes, or a wish to finish.

        Args:
            seconds: of training so far, this run's earlier calls included.
            finish: begin to fall now.
        """
        if options.steps is not None and (self.end is None or self.end > options.steps):
            self.end = options.steps
            self.num_decay = max(1, round(options.decay_share * options.steps))
        if self.is_falling(step):
            return
        if finish:
            self._fall(step, max(1, round(options.decay_share * step)))
        elif options.max_minutes is not None and step > 0:
            left = options.max_minutes * 60 - seconds
            if left <= options.decay_share * options.max_minutes * 60:
                self._fall(step, max(1, int(left * step / max(seconds, 1e-9))))

    def is_falling(self, step: int) -> bool:
        """True once the last part has begun."""
        return self.end is not None and step >= self.end - self.num_decay

    def _fall(self, step: int, num_steps: int) -> None:
        self.num_decay = num_steps
        self.end = step + num_steps if self.end is None else min(self.end, step + num_steps)
