"""The kinds of draft loops, a file each: how a method's drafter is unrolled into the step.

A loop is a function of (graph, context) that splices the captured calls of the drafter
(`ctx.draft`), makes the role `drafts` ([B, K] int32 target ids, PAD where nothing is proposed) and
returns how many drafter passes it spliced.  Which one runs is a capability of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from compilespec.methods.capabilities import DraftKind
from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.callback import callback
from compilespec.passes.draft_loops.direct import direct, keep_history
from compilespec.passes.draft_loops.kept_inputs import keep_inputs
from compilespec.passes.draft_loops.recycled import recycled
from compilespec.passes.draft_loops.shared_kv import shared_kv
from compilespec.passes.draft_loops.unshifted import num_unshifted_passes, unshifted
from compilespec.passes.draft_loops.windowed import windowed


@dataclass(frozen=True, kw_only=True)
class DraftLoop:
    """One kind of draft loop, and how many drafter passes it must splice."""

    splice: Callable[[fx.GraphModule, PassContext], int]
    num_passes: Callable[[PassContext], int]
    several_k: bool = True  # whether steps may verify and draft fewer than the largest K
    keep: Callable[[fx.GraphModule, PassContext], None] | None = None  # in steps of K = 0
    needs_replay: bool = False  # after steps of K = 0, before it drafts again
    allows_no_drafts: bool = True  # whether steps of K = 0 are possible
    fills_rows: bool = False  # its one call gives the drafts of the largest K


LOOPS: Mapping[DraftKind, DraftLoop] = {
    "recycled": DraftLoop(
        splice=recycled,
        num_passes=lambda ctx: ctx.config.num_draft_tokens,
        keep=keep_inputs,
        needs_replay=True,
    ),
    "windowed": DraftLoop(
        splice=windowed,
        num_passes=lambda ctx: ctx.config.num_draft_tokens,
        several_k=False,  # every module's cache needs every step
    ),
    "direct": DraftLoop(
        splice=direct, num_passes=lambda ctx: 1, keep=keep_history, fills_rows=True
    ),
    "shared_kv": DraftLoop(splice=shared_kv, num_passes=lambda ctx: ctx.config.num_draft_tokens),
    "callback": DraftLoop(splice=callback, num_passes=lambda ctx: 0),
    "unshifted": DraftLoop(
        splice=unshifted, num_passes=num_unshifted_passes, allows_no_drafts=False
    ),
}
