"""The K from which a method's steps may choose, unless one is given."""

from __future__ import annotations

import dataclasses

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.passes.splice.acceptance.registry import is_lossless
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.pipeline.options import AUTO, CompileOptions, own_draft_tokens

FOUND = (0, 2, 4, 8)  # look-ups are free: many drafts after a long match, none elsewhere
DRAFTED = (0, 1, 3, 5)  # each draft of a model takes a pass of the model


def resolve_draft_counts(
    options: CompileOptions, capabilities: Capabilities, drafter: Drafter | None
) -> tuple[CompileOptions, tuple[str, ...]]:
    """The options with their K, and a line for `Engine.plan()` where the choice was left to us.

    Without a number, a step may draft nothing where drafts do not pay; "auto" has more to choose
    from.  Raises: InvalidOption where there is no drafter, or a tree.
    """
    has_drafts = drafter is not None and capabilities.kind != "none"
    is_auto = options.num_draft_tokens == AUTO
    if options.num_draft_tokens is None and has_drafts and options.draft_tree is None:
        if not capabilities.prefers_auto:
            return _own_or_none(options, capabilities, drafter)
        is_auto = True
    if not is_auto:
        return options, ()
    if not has_drafts:
        raise InvalidOption(
            f"num_draft_tokens={AUTO!r} needs a drafting method; give spec=, or leave it out"
        )
    if options.draft_tree is not None:
        raise InvalidOption(
            "draft_tree= says how many tokens are drafted; leave num_draft_tokens= out"
        )
    own = own_draft_tokens(drafter)
    if why_one_k := _why_one_k(options, capabilities):
        return (
            dataclasses.replace(options, num_draft_tokens=None),
            (f"num_draft_tokens={AUTO!r}: K={own} alone, for {why_one_k}",),
        )
    wanted = FOUND if capabilities.looks_up else (*DRAFTED, own)
    most = getattr(drafter, "max_draft_tokens", None) or max(wanted)
    limit = min(options.max_seq_len or most + 1, most + 1)
    counts = tuple(sorted({k for k in wanted if k < limit}))
    why = (
        f"num_draft_tokens={AUTO!r}: every step verifies {', '.join(map(str, counts[:-1]))} or "
        f"{counts[-1]} drafts, whichever pays"
    )
    return dataclasses.replace(options, num_draft_tokens=counts), (why,)


def _own_or_none(
    options: CompileOptions, capabilities: Capabilities, drafter: Drafter | None
) -> tuple[CompileOptions, tuple[str, ...]]:
    """The drafter's own K, and no drafts.  A lossy rule keeps one K: its tokens follow the drafts,
    and would depend on the times of steps.
    """
    own = own_draft_tokens(drafter)
    lossless = is_lossless(options.acceptance_rule) and capabilities.lossless
    if _why_one_k(options, capabilities) or not lossless or own >= (options.max_seq_len or own + 1):
        return options, ()
    why = (
        f"a step verifies {own} drafts, or none where they do not pay; num_draft_tokens={own} has "
        f"{own} in every step"
    )
    return dataclasses.replace(options, num_draft_tokens=(0, own)), (why,)


def _why_one_k(options: CompileOptions, capabilities: Capabilities) -> str | None:
    """Why all steps have one K, in words."""
    if options.acceptance_rule.reads_draft_probs:
        return f"acceptance={options.acceptance_rule.rule!r} takes one K"
    why = LOOPS[capabilities.kind].why_one_k
    return why and f"spec={capabilities.name!r} {why.split(':')[0].split(', or')[0]}"
