"""The acceptance rules by name: one file and one line each.

A rule emits its nodes into the step; `splice_acceptance` names the results and does what all rules
share.  The engine chooses the rule (`acceptance=`), not the method.
"""

from __future__ import annotations

import dataclasses

from compilespec.passes.splice.acceptance import multi_candidate, relaxed, strict, tree_rules, user
from compilespec.passes.splice.acceptance.base import Judged, Rule
from compilespec.passes.splice.acceptance.block import block_verification
from compilespec.passes.splice.acceptance.rejection import ratio_test
from compilespec.passes.splice.acceptance.rule import Acceptance

RULES: dict[str, Rule] = {
    "strict": strict.RULE,
    "relaxed": relaxed.RULE,
    "rejection": dataclasses.replace(user.RULE, decode_tree=multi_candidate.decode_tree),
    "block": user.RULE,
    "user": dataclasses.replace(user.RULE, decode_tree=tree_rules.decode_tree),
}
# Rules that are functions under the contract of `acceptance_rule`.
FUNCTIONS = {"rejection": ratio_test, "block": block_verification}


def is_lossless(acceptance: Acceptance) -> bool:
    """True where the output is distributed as the target's own for any drafts."""
    function = acceptance.function
    lossless = RULES[acceptance.rule].lossless if function is None else function.lossless
    return bool(lossless) and not acceptance.force_num_accepted


def describe(acceptance: Acceptance) -> str:
    """The description in `Engine.plan()`."""
    parts = [acceptance.rule]
    if acceptance.rule == "user" and acceptance.function is not None:
        states = "lossless" if acceptance.function.lossless else "lossy"
        parts = [f"user: {acceptance.function.name}, which states that it is {states}"]
    if acceptance.relaxed is not None:
        options = acceptance.relaxed
        parts.append(
            f"topk={options.topk}, delta={options.delta:g} from token "
            f"{options.begin_thinking_token_id} to token {options.end_thinking_token_id}"
        )
    if acceptance.force_num_accepted:
        parts.append(f"{acceptance.force_num_accepted} drafts accepted by force")
    if not is_lossless(acceptance):
        parts.append("LOSSY: the output is not the target's own")
    return "; ".join(parts)


__all__ = ["FUNCTIONS", "RULES", "Judged", "Rule", "describe", "is_lossless"]
