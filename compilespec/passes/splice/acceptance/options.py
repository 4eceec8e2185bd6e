"""The keywords of `compile()` that say how drafts are judged, checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from compilespec.errors import InvalidOption, is_integer
from compilespec.errors.suggest import not_one_of
from compilespec.passes.splice.acceptance.registry import FUNCTIONS, RULES, describe, is_lossless
from compilespec.passes.splice.acceptance.rule import (
    Acceptance,
    Relaxed,
    RuleFunction,
    rule_function,
)

logger = logging.getLogger("compilespec")

RELAXED_OPTIONS = (
    "relaxed_topk",
    "relaxed_delta",
    "begin_thinking_token_id",
    "end_thinking_token_id",
)

ACCEPTANCE_OPTIONS = (*RELAXED_OPTIONS, "force_num_accepted")  # taken out of the method's options

# For benchmarks of programs that cannot be changed; the second is TensorRT-LLM's name for it.
FORCE_VARIABLES = (
    "COMPILESPEC_FORCE_NUM_ACCEPTED",
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS",
)


def resolve_acceptance(
    acceptance: str | Callable[..., Any],
    force_num_accepted: int | None = None,
    **relaxed: int | float | None,
) -> Acceptance:
    """The rule by name, with its options.

    Args:
        force_num_accepted: None asks the environment (`FORCE_VARIABLES`), once, here.
        relaxed: `RELAXED_OPTIONS`; None if not given.
    Raises: InvalidOption.
    """
    rule, function = _rule(acceptance)
    return Acceptance(
        rule=rule,
        relaxed=_relaxed(rule, relaxed),
        function=function,
        force_num_accepted=_force_num_accepted(force_num_accepted),
    )


def warn_if_lossy(acceptance: Acceptance) -> None:
    """Log a warning where tokens would not be those of plain decoding, nor so distributed."""
    if not is_lossless(acceptance):
        logger.warning("acceptance: %s", describe(acceptance))


def _rule(acceptance: str | Callable[..., Any]) -> tuple[str, RuleFunction | None]:
    """A rule's name, and its function if it is a function of probabilities."""
    if callable(acceptance):
        return "user", rule_function(acceptance)
    names = ("auto", *(name for name in RULES if name != "user"))
    if acceptance not in names:
        rules = ", or a function marked with @compilespec.acceptance_rule"
        raise not_one_of("acceptance", acceptance, names, also=rules)
    rule = "strict" if acceptance == "auto" else acceptance
    function = FUNCTIONS.get(rule)
    return rule, None if function is None else rule_function(function, rule)


def _relaxed(rule: str, given: dict[str, Any]) -> Relaxed | None:
    present = [name for name, value in given.items() if value is not None]
    if rule != "relaxed":
        if present:
            raise InvalidOption(f"{', '.join(present)}: only with acceptance='relaxed'")
        return None
    missing = [name for name in RELAXED_OPTIONS if name not in present]
    if missing:
        raise InvalidOption(
            f"acceptance='relaxed' is lossy and has no defaults; give {', '.join(missing)}"
        )
    for name in ("relaxed_topk", "begin_thinking_token_id", "end_thinking_token_id"):
        low = int(name == "relaxed_topk")
        if not is_integer(given[name]) or given[name] < low:
            raise InvalidOption(f"{name} must be an integer of {low} or more; got {given[name]!r}")
    topk, delta, begin, end = (given[name] for name in RELAXED_OPTIONS)
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 <= delta <= 1:
        raise InvalidOption(
            f"relaxed_delta must be a difference of probabilities, 0 to 1; got {delta!r}"
        )
    if begin == end:
        raise InvalidOption(f"the tokens that begin and end thinking must differ; got {begin}")
    return Relaxed(
        topk=topk, delta=float(delta), begin_thinking_token_id=begin, end_thinking_token_id=end
    )


def _force_num_accepted(given: int | None) -> int:
    """The option, else the environment, else 0.  Source: requirements I1, H-1."""
    if given is None:
        given = _force_from_environment()
    if not is_integer(given) or given < 0:
        raise InvalidOption(
            f"force_num_accepted must be 0 (off) or a positive number of drafts; got {given!r}"
        )
    return given


def _force_from_environment() -> int:
    for name in FORCE_VARIABLES:
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            return int(text)
        except ValueError:
            logger.warning("%s=%r is not an integer: nothing is forced", name, text)
            return 0
    return 0
