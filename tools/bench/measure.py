"""Interleaved timing: ways run the same prompts by turns, so that noise affects all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Samples:
    """The measurements of one way at one batch size; one entry per generate call."""

    ms: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> list[float]:
        return [n / ms * 1e3 for n, ms in zip(self.num_tokens, self.ms, strict=True)]

    def summary(self) -> dict[str, object]:
        return {
            "tokens_per_s": quantiles(self.tokens_per_s),
            "tokens_per_s_whole_run": sum(self.num_tokens) / sum(self.ms) * 1e3,
            "generate_ms": quantiles(self.ms),
            "num_calls": len(self.ms),
            "num_tokens": sum(self.num_tokens),
        }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p20, p50, p80 by linear interpolation.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("quantiles: expected at least one sample, got none")
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"p20": at(0.2), "p50": at(0.5), "p80": at(0.8)}


def interleave(
    calls: Mapping[str, Callable[[int], int]],
    num_inputs: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    on_call: Callable[[str], None] | None = None,
) -> dict[str, Samples]:
    """Time every way on every input, `rounds` times over.

    Args:
        calls: way -> function of the input's index that runs it and returns its token count.
        num_inputs: each way sees all of them in each round.
        on_call: told the way's name after each call (progress).
    Returns:
        The samples of each way.  On each input the ways run one after the other, and the first one
        rotates, so that no way always follows the same one's caches.
    """
    names = list(calls)
    samples = {name: Samples() for name in names}
    for turn in range(rounds * num_inputs):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock()
            num_tokens = calls[name](turn % num_inputs)
            samples[name].ms.append((clock() - start) * 1e3)
            samples[name].num_tokens.append(num_tokens)
            if on_call is not None:
                on_call(name)
    return samples
