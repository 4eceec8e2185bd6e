"""Stage "rewrite": the passes in order, what each must match, and the steps that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from compilespec.passes import contracts, references
from compilespec.passes.aten.bound_positions import bound_positions
from compilespec.passes.aten.check_mutations import check_mutations
from compilespec.passes.aten.cleanup import cleanup
from compilespec.passes.aten.fuse_head_argmax import fuse_head_argmax
from compilespec.passes.aten.merge_projections import merge_projections
from compilespec.passes.aten.prepack_linears import prepack_linears
from compilespec.passes.aten.read_long_rows import read_long_rows
from compilespec.passes.context import PassContext
from compilespec.passes.graph.nodes import output_node
from compilespec.passes.graph.retrace import start_replay, start_step, to_aten
from compilespec.passes.runner import Pass, check_order, run_passes
from compilespec.passes.splice.absorb_latents import absorb_latents
from compilespec.passes.splice.add_adapters import add_adapters, num_adapted
from compilespec.passes.splice.add_deep_rows import add_deep_rows, num_deep_rows
from compilespec.passes.splice.check_markers import check_markers
from compilespec.passes.splice.commit_state import commit_drafts, commit_state
from compilespec.passes.splice.draft_loops.kept_inputs import READ_BY_REPLAY, read_kept
from compilespec.passes.splice.evidence import report_evidence
from compilespec.passes.splice.insert_cached_keys import insert_cached_keys, num_cached_keys
from compilespec.passes.splice.insert_paged_attention import insert_paged_attention
from compilespec.passes.splice.insert_recurrent_state import insert_recurrent_state
from compilespec.passes.splice.keep_path import keep_path
from compilespec.passes.splice.lower_quantized import lower_quantized
from compilespec.passes.splice.narrow_logits import narrow_logits
from compilespec.passes.splice.narrow_rows import narrow_rows
from compilespec.passes.splice.output_head_input import output_head_input
from compilespec.passes.splice.output_hidden_states import output_hidden_states
from compilespec.passes.splice.process_logits import num_processors, process_logits
from compilespec.passes.splice.read_embeds import read_embeds
from compilespec.passes.splice.read_long_rope import read_long_rope
from compilespec.passes.splice.read_rope_offsets import read_rope_offsets
from compilespec.passes.splice.read_state import read_state
from compilespec.passes.splice.shard_weights import shard_weights
from compilespec.passes.splice.shift_hidden_states import pairs_hidden_states, shift_hidden_states
from compilespec.passes.splice.splice_acceptance import splice_acceptance
from compilespec.passes.splice.splice_draft_loop import num_drafter_passes, splice_draft_loop
from compilespec.passes.splice.tap_hidden_states import tap_hidden_states
from compilespec.passes.splice.trees import verifies_tree
from compilespec.passes.splice.trim_draft_head import num_proposals, trim_draft_head
from compilespec.program import PhaseGraph, StepGraph
from compilespec.tracing.structure import num_decoder_layers


def _for_prompts(feature: str) -> Callable[[PassContext], int | None]:
    """One match in the prefill of a program whose requests may ask for the feature."""

    def matches(ctx: PassContext) -> int | None:
        return 1 if ctx.phase == "prefill" and getattr(ctx.config.features, feature) else None

    return matches


_DRAFT_LOOP = Pass(
    run=splice_draft_loop,
    after=("shift_hidden_states",),
    matches=num_drafter_passes,
    looks_for="passes of the drafter",
    near=("paged_attention",),
    ensures=(contracts.plays("drafts"),),
    reference=references.splice_draft_loop,
)

_TRIM = Pass(
    run=trim_draft_head,
    after=("splice_draft_loop",),
    matches=lambda ctx: None if ctx.draft_ids is None else num_proposals(ctx) or None,
    looks_for="argmaxes over the drafter's head",
    near=("argmax", "linear"),
    ensures=(contracts.DRAWN_BY_ID,),
    reference=references.trim_draft_head,
)

_SHARD = Pass(
    run=shard_weights,
    after=("splice_draft_loop", "trim_draft_head"),
    numerics="rounding",  # what the ranks got is added in their order
    matches=lambda ctx: None if ctx.sharding is None else 1,
)

# Torch IR, as captured by Dynamo: these passes only splice, and never eliminate dead code.
SPLICE_PASSES = (
    Pass(
        run=check_markers,
        matches=lambda ctx: ctx.num_attention_layers,
        looks_for="an attention marker for each layer that was traced",
        near=("attention", "softmax"),
    ),
    Pass(run=absorb_latents, after=("check_markers",), numerics="rounding", at_least=0),
    Pass(
        run=tap_hidden_states,
        matches=lambda ctx: len(ctx.drafter.aux_layers) or None,
        ensures=(contracts.TAPPED,),
        reference=references.tap_hidden_states,
    ),
    Pass(
        run=read_rope_offsets,
        after=("check_markers",),
        matches=lambda ctx: 1 if ctx.target.has_rope_offsets else None,
        ensures=(contracts.NO_OFFSETS,),
        reference=references.read_rope_offsets,
    ),
    Pass(
        run=read_state,
        after=("check_markers", "read_rope_offsets"),
        matches=lambda ctx: 2,
        ensures=(
            contracts.NO_ARGUMENTS,
            contracts.plays("ids", "position", "row", "slot", "row_index", "live", "start"),
        ),
        reference=references.read_state,
    ),
    Pass(
        run=read_long_rope,
        after=("read_state",),
        matches=lambda ctx: 1 if ctx.target.has_long_rope else None,
        ensures=(contracts.NO_LENGTHS,),
        reference=references.read_long_rope,
    ),
    Pass(
        run=read_embeds,
        after=("tap_hidden_states", "read_state"),
        matches=_for_prompts("prompt_embeds"),
        looks_for="the embedding of token ids",
        near=("embedding",),
        reference=references.read_embeds,
    ),
    Pass(
        run=add_deep_rows,
        after=("tap_hidden_states", "read_embeds"),
        matches=num_deep_rows,
        looks_for="places for features of images",
        near=("deep_rows",),
        ensures=(contracts.NO_DEEP_ROWS,),
        reference=references.add_deep_rows,
    ),
    Pass(
        run=add_adapters,
        after=("absorb_latents", "read_state"),
        numerics="rounding",
        matches=num_adapted,
        looks_for="products of the modules that adapters may change",
        near=("linear",),
        reference=references.add_adapters,
    ),
    Pass(
        run=narrow_logits,
        after=("read_state",),
        numerics="rounding",  # a library may order the sums of fewer rows differently
        ensures=(contracts.plays("logits"),),
        reference=references.narrow_logits,
        matches=lambda ctx: 1 if ctx.phase == "prefill" else None,
    ),
    Pass(
        run=insert_cached_keys,
        after=("read_state", "absorb_latents"),
        matches=num_cached_keys,
        looks_for="what masks read of earlier tokens, as it was traced",
        near=("topk", "scatter"),
        ensures=(contracts.NO_STATELESS_KEYS,),
        reference=references.insert_cached_keys,
    ),
    Pass(
        run=insert_paged_attention,
        after=("insert_cached_keys",),
        numerics="rounding",
        matches=lambda ctx: ctx.num_attention_layers,
        looks_for="an attention marker for each layer that was traced",
        near=("attention", "softmax"),
        ensures=(contracts.NO_STATELESS, contracts.OWN_CACHES),
        reference=references.insert_paged_attention,
    ),
    Pass(
        run=insert_recurrent_state,
        after=("read_state",),
        numerics="rounding",
        matches=lambda ctx: ctx.num_recurrent_markers or None,
        looks_for="a marker for each recurrence and causal convolution that was traced",
        near=("recurrence", "conv"),
        ensures=(contracts.NO_STATELESS_RECURRENCE, contracts.plays("absorbed", "commits")),
        reference=references.insert_recurrent_state,
    ),
    Pass(
        run=process_logits,
        after=("narrow_logits",),
        numerics="rounding",  # a module may order the sums of fewer rows differently
        matches=num_processors,
        ensures=(contracts.plays("logits", "raw_logits"),),
        reference=references.process_logits,
    ),
    Pass(
        run=splice_acceptance,
        after=("narrow_logits", "process_logits"),
        matches=lambda ctx: 1,
        ensures=(
            contracts.gives("emitted_BS", "num_emitted_B|outcome_B"),
            contracts.plays("target", "num_emitted"),
        ),
        reference=references.splice_acceptance,
    ),
    Pass(
        run=keep_path,
        after=("tap_hidden_states", "insert_paged_attention", "splice_acceptance"),
        matches=lambda ctx: ctx.num_attention_layers if verifies_tree(ctx) else None,
        looks_for="caches of the target's layers",
        near=("paged_attention",),
        ensures=(contracts.plays("position", "row", "slot"), contracts.KEPT_PATHS),
        reference=references.keep_path,
    ),
    Pass(
        run=output_hidden_states,
        after=("tap_hidden_states", "splice_acceptance"),
        matches=lambda ctx: 1 if ctx.capabilities.outputs_hidden_states else None,
        ensures=(contracts.plays("hidden"),),
        reference=references.output_hidden_states,
    ),
    Pass(
        run=output_head_input,
        after=("narrow_logits", "splice_acceptance", "output_hidden_states"),
        matches=_for_prompts("prompt_logprobs"),
        ensures=(contracts.plays("head_input"),),
        reference=references.output_head_input,
    ),
    Pass(
        run=shift_hidden_states,
        after=("tap_hidden_states", "splice_acceptance"),
        matches=lambda ctx: 1 if pairs_hidden_states(ctx) else None,
        ensures=(contracts.plays("draft_ids", "aux"),),
        reference=references.shift_hidden_states,
    ),
    _DRAFT_LOOP,
    _TRIM,
    Pass(
        run=narrow_rows,
        after=("insert_paged_attention", "splice_draft_loop", "trim_draft_head"),
        numerics="rounding",  # a library may order the sums of fewer rows differently
        at_least=0,
    ),
    Pass(
        run=lower_quantized,
        after=("splice_draft_loop", "trim_draft_head"),
        numerics="rounding",
        at_least=0,
    ),
    Pass(
        run=report_evidence,
        after=("splice_acceptance", "splice_draft_loop"),
        matches=lambda ctx: 1 if ctx.tells_evidence else None,
        ensures=(contracts.gives("emitted_BS", "outcome_B"),),
        reference=references.report_evidence,
    ),
    Pass(
        run=commit_state,
        after=("splice_draft_loop",),
        matches=lambda ctx: 1,
        ensures=(contracts.writes_buffers("tokens_RS", "seq_len_R"),),
        reference=references.commit_state,
    ),
    dataclasses.replace(_SHARD, after=("narrow_rows", "lower_quantized", "commit_state")),
)

# Torch IR, from a graph of nothing: the drafter alone, over the inputs that steps of K = 0 kept.
REPLAY_PASSES = (
    Pass(
        run=read_kept,
        matches=lambda ctx: 1,
        ensures=(
            contracts.plays("draft_ids", "position", "row", "slot", "row_index", "live"),
            contracts.plays("start", "num_emitted"),
        ),
        reference=references.read_kept,
    ),
    dataclasses.replace(_DRAFT_LOOP, after=("read_kept",)),
    _TRIM,
    Pass(
        run=commit_drafts,
        after=("splice_draft_loop",),
        matches=lambda ctx: 1,
        ensures=(contracts.gives("tokens_BS"), contracts.writes_buffers("tokens_RS")),
        reference=references.commit_drafts,
    ),
    _SHARD,
)

# ATen, after the one retrace: everything that matches and rewrites.
ATEN_PASSES = (
    Pass(run=cleanup, at_least=0),
    Pass(run=merge_projections, after=("cleanup",), numerics="rounding", at_least=0),
    Pass(run=fuse_head_argmax, after=("cleanup",), numerics="rounding", at_least=0),
    Pass(run=read_long_rows, after=("fuse_head_argmax",), numerics="rounding", at_least=0),
    Pass(
        run=prepack_linears,
        after=("merge_projections",),
        numerics="rounding",
        at_least=0,
        ensures=(contracts.ALL_PACKED,),
    ),
    Pass(run=bound_positions, after=("prepack_linears", "read_long_rows"), at_least=0),
    Pass(
        run=check_mutations,
        after=("bound_positions",),
        matches=lambda ctx: sum(
            not buffer.by_host and not (ctx.is_replay and buffer.name in READ_BY_REPLAY)
            for buffer in ctx.buffers.values()
        ),
        looks_for="writes of every buffer that the host does not write",
        near=("paged_attention", "index_put_"),
    ),
)

check_order(SPLICE_PASSES)
check_order(REPLAY_PASSES)
check_order(ATEN_PASSES)


def rewrite_phase(
    ctx: PassContext, *, keep_graphs: bool = False, disabled: frozenset[str] = frozenset()
) -> PhaseGraph:
    """Splice one step; rewriting it on ATen is deferred until that graph is needed.
    Raises: PassError.
    """
    is_replay = ctx.key.kind == "replay"
    gm = start_replay() if is_replay else start_step(ctx)
    passes = REPLAY_PASSES if is_replay else SPLICE_PASSES
    records = run_passes(gm, ctx, passes, level="torch", keep_graphs=keep_graphs, disabled=disabled)

    def finish() -> StepGraph:
        return finish_phase(gm, ctx, keep_graphs=keep_graphs, disabled=disabled)

    return PhaseGraph(
        key=ctx.key,
        spliced=gm,
        splice_records=tuple(records),
        finish=finish,
        context=ctx,
        num_layers=num_decoder_layers(ctx.target.graph_module.graph),
    )


def finish_phase(
    gm: fx.GraphModule,
    ctx: PassContext,
    *,
    keep_graphs: bool = False,
    disabled: frozenset[str] = frozenset(),
) -> StepGraph:
    """The spliced step as an ATen graph, rewritten.  Raises: PassError."""
    aten, record = to_aten(gm, ctx, keep_graphs=keep_graphs)
    records = run_passes(
        aten, ctx, ATEN_PASSES, level="aten", keep_graphs=keep_graphs, disabled=disabled
    )
    placeholders = [node for node in aten.graph.nodes if node.op == "placeholder"]
    return StepGraph(
        graph_module=aten,
        inputs=tuple(ctx.inputs[node.meta["role"]] for node in placeholders),
        outputs=tuple(output_node(aten).meta["names"]),
        fakes=tuple(node.meta["val"] for node in placeholders),
        records=(record, *records),
    )


__all__ = [
    "ATEN_PASSES",
    "REPLAY_PASSES",
    "SPLICE_PASSES",
    "Pass",
    "PassContext",
    "rewrite_phase",
    "run_passes",
]
