"""How the drafts of a step are judged: the rule and its options, fixed when a program is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from compilespec.errors import InvalidOption

# What a rule function may read, by parameter name.
RULE_INPUTS = (
    "probs_BSV",
    "logits_BSV",
    "draft_probs_BKV",
    "draft_BK",
    "num_drafts_B",
    "uniform_BK",
    "parents_BS",
)
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """Options of the relaxed rule.  Source: requirement M10."""

    topk: int
    """A draft may be among this many best tokens of the target while the request thinks."""

    delta: float
    """How much less probable than the best one it may be: a difference of probabilities, 0 to 1."""

    begin_thinking_token_id: int
    """The token that begins thinking."""

    end_thinking_token_id: int
    """The token that ends thinking: afterwards drafts are judged strictly."""


@dataclass(frozen=True, kw_only=True)
class RuleFunction:
    """A rule that is a function of tensors, traced into the step; see `acceptance_rule`."""

    function: Callable[..., Any]
    """The function, or a module."""

    name: str
    """Its name in `Engine.plan()`."""

    lossless: bool
    """True where it claims that the output is distributed as the target's own."""

    inputs: tuple[str, ...]
    """Which of `RULE_INPUTS` it reads, in the order of its parameters."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """A rule of `passes.splice.acceptance` by name, and its options."""

    rule: str = "strict"
    """Name of the rule."""

    relaxed: Relaxed | None = None
    """Set exactly if the rule is "relaxed"."""

    function: RuleFunction | None = None
    """Set if the rule is a function of probabilities: "rejection", "block", a user's."""

    force_num_accepted: int = 0
    """For benchmarks: every step accepts this many drafts (at most K), right or not; 0: off."""

    @property
    def couples_drafts(self) -> bool:
        """True where drafts are drawn with the target's noise, else with other noise (H-15)."""
        return self.function is None

    @property
    def reads_draft_probs(self) -> bool:
        """True where the distribution that each draft was drawn from is kept for the next step."""
        return self.function is not None and "draft_probs_BKV" in self.function.inputs


STRICT = Acceptance()


def acceptance_rule(*, lossless: bool) -> Callable[[AnyFunction], AnyFunction]:
    """Mark a function (or a module's class) as a rule for `compile(acceptance=...)`.

    The names of its parameters say which of these it reads:

    probs_BSV        the target's distribution at each row of the window, after temperature,
                     penalties, bias, guide and filters; a greedy request's is 1 at its
                     token.  A row without an id to choose, as after a draft that a guide forbids,
                     is 0 everywhere; never NaN unless the logits are
    logits_BSV       the target's logits as they are
    draft_probs_BKV  what each draft was drawn from, over the target's ids; 1 at the draft where the
                     drafter gives no distribution
    draft_BK         int32, the drafts; -1 where there is none
    num_drafts_B     int32, how many leading drafts are to be judged, 0..K
    uniform_BK       float32 in (0, 1), one for each draft, independent of all other noise
    parents_BS       int32, the row of the window that each row follows; row 0 is its own

    The window is the last token and the drafts, K + 1 rows.  With `draft_tree=` it is a tree of N
    drafts: row i + 1 holds draft_BK[:, i], K is N there, and a rule reads `parents_BS` and neither
    `num_drafts_B` nor `draft_probs_BKV`; no row comes before its parent.

    Probabilities are float32, or float64 in a float64 program.  It returns two tensors: how many
    leading drafts are accepted, [B] integers, of a tree the row of the last one (no more than
    `num_drafts_B` are, and none from the first on that a guide forbids, whose probability is 0, or
    that there is not), and what the one token after them is:
    weights to draw it by, [B, V] (they need not sum to one, negative ones count as 0; rows without
    any weight, or cut short by a guide, fall back to the target's distribution), or its id, [B]
    integers.  It is traced once, for any B: tensor code without branches on values.

    Drafts, acceptance and the last token are drawn with noise of disjoint streams, new in each
    step.  Whether a rule is lossless, its tokens distributed as the target's, nothing checks.
    """
    if not isinstance(lossless, bool):
        raise InvalidOption(f"acceptance_rule: lossless must be True or False; got {lossless!r}")

    def mark(function: AnyFunction) -> AnyFunction:
        function.lossless = lossless  # type: ignore[attr-defined]
        return function

    return mark


def rule_function(function: Any, name: str | None = None) -> RuleFunction:
    """Make a rule from a function or module.  Raises: InvalidOption."""
    title = name or getattr(function, "__name__", type(function).__name__)
    lossless = getattr(function, "lossless", None)
    if not isinstance(lossless, bool):
        raise InvalidOption(
            f"acceptance={title}: a rule states whether it is lossless; mark it with "
            f"@compilespec.acceptance_rule(lossless=True) or False"
        )
    body = function.forward if hasattr(function, "forward") else function
    inputs = tuple(inspect.signature(body).parameters)
    unknown = [parameter for parameter in inputs if parameter not in RULE_INPUTS]
    if unknown or not inputs:
        raise InvalidOption(
            f"acceptance={title}: a rule reads any of {', '.join(RULE_INPUTS)}; got "
            f"{', '.join(unknown) or 'no parameter'}"
        )
    return RuleFunction(function=function, name=str(title), lossless=lossless, inputs=inputs)
