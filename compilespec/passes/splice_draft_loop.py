"""The drafter's passes, unrolled into the step."""

from __future__ import annotations

from torch import fx

from compilespec.passes.draft_loops import LOOPS
from compilespec.passes.runner import PassContext


def splice_draft_loop(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splice the draft loop of the method's kind; it makes the role `drafts` ([B, K], int32).

    Returns: the number of drafter passes.  Numerics: exact.  Torch IR.
    Source: DESIGN section 3.
    """
    return LOOPS[ctx.capabilities.kind].splice(gm, ctx)


def num_drafter_passes(ctx: PassContext) -> int | None:
    """How many passes the loop must splice; None without a drafter."""
    return LOOPS[ctx.capabilities.kind].num_passes(ctx) if ctx.has_drafter else None
