"""How the drafts of a step are judged: the rule and its options, fixed when a program is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """Options of the relaxed rule.  Source: requirement M10."""

    topk: int
    """A draft may be among this many best tokens of the target while the request thinks."""

    delta: float
    """How much less probable than the best one it may be; a difference of probabilities."""

    begin_thinking_token_id: int
    """After this token the request thinks."""

    end_thinking_token_id: int
    """After this token it does not: its drafts are judged strictly."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """A rule of `passes.acceptance` by name, and what it is given."""

    rule: str = "strict"
    """Name of the rule."""

    relaxed: Relaxed | None = None
    """Given exactly where the rule is "relaxed"."""

    force_num_accepted: int = 0
    """For benchmarks: every step accepts this many drafts (at most K), right or not; 0: off."""


STRICT = Acceptance()
