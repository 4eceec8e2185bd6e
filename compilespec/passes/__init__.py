"""Stage "rewrite": the pipeline of passes, in order, and what each must match."""

from __future__ import annotations

from compilespec.passes.bound_positions import bound_positions
from compilespec.passes.check_markers import check_markers
from compilespec.passes.check_mutations import check_mutations
from compilespec.passes.cleanup import cleanup
from compilespec.passes.commit_state import commit_state
from compilespec.passes.insert_paged_attention import insert_paged_attention
from compilespec.passes.merge_projections import merge_projections
from compilespec.passes.narrow_logits import narrow_logits
from compilespec.passes.prepack_linears import prepack_linears
from compilespec.passes.read_state import read_state
from compilespec.passes.runner import Pass, PassContext, check_order, run_passes
from compilespec.passes.shift_hidden_states import shift_hidden_states
from compilespec.passes.splice_acceptance import splice_acceptance
from compilespec.passes.splice_draft_loop import splice_draft_loop
from compilespec.passes.tap_hidden_states import tap_hidden_states

# Torch IR, as Dynamo gives it: only splicing happens here, never dead-code elimination.
SPLICE_PASSES = (
    Pass(run=check_markers, matches=lambda ctx: ctx.num_attention_layers),
    Pass(run=tap_hidden_states, matches=lambda ctx: len(ctx.aux_layers) or None),
    Pass(run=read_state, after=("check_markers",), matches=lambda ctx: 2),
    Pass(
        run=narrow_logits,
        after=("read_state",),
        matches=lambda ctx: 1 if ctx.phase == "prefill" else None,
    ),
    Pass(
        run=insert_paged_attention,
        after=("read_state",),
        numerics="rounding",
        matches=lambda ctx: ctx.num_attention_layers,
    ),
    Pass(run=splice_acceptance, after=("narrow_logits",), matches=lambda ctx: 1),
    Pass(
        run=shift_hidden_states,
        after=("tap_hidden_states", "splice_acceptance"),
        matches=lambda ctx: 1 if ctx.has_drafter else None,
    ),
    Pass(
        run=splice_draft_loop,
        after=("shift_hidden_states",),
        matches=lambda ctx: ctx.config.num_draft_tokens if ctx.has_drafter else None,
    ),
    Pass(run=commit_state, after=("splice_draft_loop",), matches=lambda ctx: 1),
)

# ATen, after the one retrace: everything that matches and rewrites.
ATEN_PASSES = (
    Pass(run=cleanup, at_least=0),
    Pass(run=merge_projections, after=("cleanup",), numerics="rounding", at_least=0),
    Pass(run=prepack_linears, after=("merge_projections",), numerics="rounding", at_least=0),
    Pass(run=bound_positions, after=("prepack_linears",), at_least=0),
    Pass(
        run=check_mutations,
        after=("bound_positions",),
        matches=lambda ctx: len(ctx.buffers) - 1,  # all but the block table, which the host writes
    ),
)

check_order(SPLICE_PASSES)
check_order(ATEN_PASSES)

__all__ = ["ATEN_PASSES", "SPLICE_PASSES", "Pass", "PassContext", "run_passes"]
