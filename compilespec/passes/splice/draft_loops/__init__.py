"""The kinds of draft loops, one file each: how a method's drafter is unrolled into the step.

A loop is a function of the step that splices the captured calls of the drafter (`step.fragment`),
gives it the role `drafts` ([B, K] int32 target ids, PAD where nothing is proposed) and returns how
many drafter passes it spliced.  The method's capabilities say which loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compilespec.errors import DraftMismatch, InvalidOption, UnsupportedState
from compilespec.methods.capabilities import DraftKind
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.block import block, write_context
from compilespec.passes.splice.draft_loops.callback import callback
from compilespec.passes.splice.draft_loops.direct import direct, keep_history
from compilespec.passes.splice.draft_loops.heads import heads
from compilespec.passes.splice.draft_loops.in_place import in_place
from compilespec.passes.splice.draft_loops.kept_inputs import keep_inputs
from compilespec.passes.splice.draft_loops.masked import masked, num_masked_passes
from compilespec.passes.splice.draft_loops.parallel import num_parallel_passes, parallel
from compilespec.passes.splice.draft_loops.recycled import recycled
from compilespec.passes.splice.draft_loops.shared_kv import shared_kv
from compilespec.passes.splice.draft_loops.unshifted import num_unshifted_passes, unshifted
from compilespec.passes.splice.draft_loops.windowed import windowed
from compilespec.program import ProgramConfig, Reach, Traced


@dataclass(frozen=True, kw_only=True)
class DraftLoop:
    """One kind of draft loop: what it splices, and what K implies for the rest of the engine.

    Functions of an int are given K, the largest one of the program.
    """

    splice: Callable[[Splice], int]

    num_passes: Callable[[PassContext], int]
    """Drafter passes that `splice` must make."""

    calls: Callable[[int], Sequence[str]] = lambda k: ()
    """Captured calls of the drafter that `splice` reads of every drafter."""

    keep: Callable[[Splice], None] | None = None
    """Keeps the drafter's inputs in steps of K = 0."""

    needs_replay: bool = False
    """After steps of K = 0 the kept inputs are run before it drafts again."""

    fills_rows: bool = False
    """Its single call gives the drafts of the largest K."""

    keeps_states: bool = False
    """True where a drafter may have recurrent layers."""

    proposes_at_once: bool = False
    """One call of "propose" gives all drafts."""

    grows_trees: bool = False
    """True where the drafts may be a tree."""

    why_one_k: str | None = None
    """Why no step may verify and draft fewer than the largest K, and the cure; None: they may."""

    reach: Callable[[int], Reach] = lambda k: Reach(num_reserved_tokens=2 * k + 1)
    """How far its steps reach; they write S rows, then what the drafter writes ahead."""

    def check(self, name: str, config: ProgramConfig, smaller_draft_counts: Sequence[int]) -> None:
        """Refuse sizes that the loop of method `name` cannot work with.  Raises: InvalidOption."""
        if smaller_draft_counts and self.why_one_k:
            raise InvalidOption(f"spec={name!r} {self.why_one_k}")
        count = self.reach(config.num_draft_tokens).num_repeated_tokens
        if config.max_prefill_tokens <= count:
            raise InvalidOption(
                f"max_prefill_tokens must be above {count}: spec={name!r} with "
                f"num_draft_tokens={config.num_draft_tokens} begins each chunk of a prompt with "
                f"the {count} tokens before it; got {config.max_prefill_tokens}"
            )

    def check_calls(self, name: str, drafter: str, calls: Mapping[str, Traced], k: int) -> None:
        """Refuse a class `drafter` that did not capture what the loop of method `name` splices.

        Raises: DraftMismatch; UnsupportedState for a drafter whose states it could not rewind.
        """
        wanted, given = self.calls(k), list(calls)
        if not self.keeps_states and any(call.num_recurrent_markers for call in calls.values()):
            raise UnsupportedState(
                f"{drafter}: a drafter for spec={name!r} may not have recurrent layers, whose "
                "state it could not rewind; use one whose layers are attention, or "
                "spec='draft_model'"
            )
        if not {*wanted} <= {*given}:
            raise DraftMismatch(
                f"{drafter}: expected a drafter for spec={name!r}, which captures the calls "
                f"{', '.join(wanted)}; got {', '.join(given) or 'none'}: choose its own method, or "
                "derive it from the class that methods.base.Drafter names"
            )


LOOPS: Mapping[DraftKind, DraftLoop] = {
    "none": DraftLoop(
        splice=lambda step: 0,
        num_passes=lambda ctx: 0,
        why_one_k="drafts nothing: leave out num_draft_tokens=",
    ),
    "recycled": DraftLoop(
        splice=recycled,
        num_passes=lambda ctx: ctx.config.num_draft_tokens,
        calls=lambda k: ("combine", "forward", "propose"),
        keep=keep_inputs,
        needs_replay=True,
        reach=lambda k: Reach(
            num_reserved_tokens=2 * k + 1,
            lookahead=1,  # row t pairs hidden state t with token t+1
        ),
        grows_trees=True,
    ),
    "parallel": DraftLoop(
        splice=parallel,
        num_passes=num_parallel_passes,
        calls=lambda k: ("combine", "mask", "forward", "propose"),
        keep=keep_inputs,
        needs_replay=True,
        proposes_at_once=True,
        reach=lambda k: Reach(
            num_reserved_tokens=k + 1,  # what is drafted is written nowhere
            lookahead=1,
        ),
    ),
    "block": DraftLoop(
        splice=block,
        num_passes=lambda ctx: 1,
        calls=lambda k: ("context", "block", "forward", "propose"),
        keep=write_context,
        fills_rows=True,
        proposes_at_once=True,
        reach=lambda k: Reach(num_reserved_tokens=k + 1),
    ),
    "windowed": DraftLoop(
        splice=windowed,
        num_passes=lambda ctx: ctx.config.num_draft_tokens,
        calls=lambda k: [f"{call}.{step}" for step in range(k) for call in ("forward", "propose")],
        why_one_k="runs all its modules in every step, or their caches would have holes: give "
        "num_draft_tokens= one number",
        reach=lambda k: Reach(
            num_reserved_tokens=2 * k + 1,
            num_repeated_tokens=k - 1,  # module i needs tokens and hidden states i rows ahead
            lookahead=k,  # module i has token t+1+i, i = 0..K-1
        ),
    ),
    "direct": DraftLoop(
        splice=direct,
        num_passes=lambda ctx: 1,
        calls=lambda k: ("draft",),
        keep=keep_history,
        fills_rows=True,
    ),
    "heads": DraftLoop(
        splice=heads,
        num_passes=lambda ctx: ctx.config.num_draft_tokens,
        calls=lambda k: [f"propose.{step}" for step in range(k)],
        grows_trees=True,
        reach=lambda k: Reach(num_reserved_tokens=k + 1),
    ),
    "shared_kv": DraftLoop(
        splice=shared_kv,
        num_passes=lambda ctx: ctx.config.num_draft_tokens,
        calls=lambda k: ("combine", "forward", "propose"),
    ),
    "in_place": DraftLoop(
        splice=in_place,
        num_passes=lambda ctx: ctx.config.num_draft_tokens,
        calls=lambda k: ("forward", "propose"),
        keeps_states=True,
    ),
    "callback": DraftLoop(splice=callback, num_passes=lambda ctx: 0),
    "unshifted": DraftLoop(
        splice=unshifted,
        num_passes=num_unshifted_passes,
        keeps_states=True,
        grows_trees=True,
        calls=lambda k: ("forward", "propose"),
        keep=keep_inputs,
        needs_replay=True,
    ),
    "masked": DraftLoop(
        splice=masked,
        num_passes=num_masked_passes,
        calls=lambda k: ("forward", "mask", "propose"),
        proposes_at_once=True,
        keep=keep_inputs,
        needs_replay=True,
        reach=lambda k: Reach(num_reserved_tokens=k + 2),  # token j of a step is one further
    ),
}
