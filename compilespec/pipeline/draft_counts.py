"""The K of `num_draft_tokens="auto"`, from which a method's steps may choose."""

from __future__ import annotations

import dataclasses

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.pipeline.options import AUTO, DEFAULT_DRAFT_TOKENS, CompileOptions

FOUND = (0, 2, 4, 8)  # look-ups are free: many drafts after a long match, none elsewhere
DRAFTED = (0, 1, 3, 5)  # each draft of a model takes a pass of the model


def resolve_draft_counts(
    options: CompileOptions, capabilities: Capabilities, drafter: Drafter | None
) -> tuple[CompileOptions, tuple[str, ...]]:
    """The options with their K, and a line for `Engine.plan()` where the choice was left to us.

    Raises: InvalidOption where there is no drafter, or a tree.
    """
    wanted_auto = options.num_draft_tokens == AUTO
    if capabilities.prefers_auto and options.num_draft_tokens is None:
        wanted_auto = options.draft_tree is None
    if not wanted_auto:
        return options, ()
    name, loop = capabilities.name, LOOPS[capabilities.kind]
    if drafter is None or capabilities.kind == "none":
        raise InvalidOption(
            f"num_draft_tokens={AUTO!r} needs a drafting method; give spec=, or leave it out"
        )
    if options.draft_tree is not None:
        raise InvalidOption(
            "draft_tree= says how many tokens are drafted; leave num_draft_tokens= out"
        )
    why_one_k = loop.why_one_k and f"spec={name!r} {loop.why_one_k.split(':')[0].split(', or')[0]}"
    if options.acceptance_rule.reads_draft_probs:
        why_one_k = f"acceptance={options.acceptance_rule.rule!r} takes one K"
    own = int(getattr(drafter, "num_draft_tokens", 0) or DEFAULT_DRAFT_TOKENS)
    if why_one_k:
        return (
            dataclasses.replace(options, num_draft_tokens=None),
            (f"num_draft_tokens={AUTO!r}: K={own} alone, for {why_one_k}",),
        )
    wanted = FOUND if capabilities.looks_up else (*DRAFTED, own)
    most = getattr(drafter, "max_draft_tokens", None) or max(wanted)
    limit = min(options.max_seq_len or most + 1, most + 1)
    counts = tuple(sorted({k for k in wanted if k < limit and (k or not loop.why_never_zero)}))
    why = (
        f"num_draft_tokens={AUTO!r}: every step verifies {', '.join(map(str, counts[:-1]))} or "
        f"{counts[-1]} drafts, whichever pays"
    )
    return dataclasses.replace(options, num_draft_tokens=counts), (why,)
