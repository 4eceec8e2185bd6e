"""Every pass of the pipeline has a graph that it must leave alone, node for node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from compilespec.errors import NotSupported, PassError
from compilespec.methods.registry import get_method
from compilespec.ops.device import CUDA
from compilespec.passes.graph.nodes import find_role
from compilespec.passes.graph.retrace import start_step
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES, PassContext, run_passes
from compilespec.passes.runner import Pass
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.recurrent_state import StatePlaces, keep_states
from compilespec.passes.splice.sharding.plan import Sharding
from compilespec.program import AdapterShape, Phase, RequestFeatures, Traced
from compilespec.tracing.target import trace_target
from tests.support.hand_graphs import HAND_CONFIG, code, graph_of, reading
from tests.support.models import tiny_target

PASSES = {entry.name: entry for entry in (*SPLICE_PASSES, *ATEN_PASSES)}
Case = tuple[fx.GraphModule, PassContext]


@pytest.fixture(scope="module")
def target() -> Traced:
    return trace_target(tiny_target("llama", torch.float32, num_layers=2))


def context(target: Traced, phase: Phase, **changes: Any) -> PassContext:
    fields: dict[str, Any] = {
        "phase": phase, "config": HAND_CONFIG, "draft": {}, "target": target,
        "capabilities": get_method("none").capabilities,
    }  # fmt: skip
    return PassContext(**{**fields, **changes})


def step(target: Traced, phase: Phase, *done: str, **changes: Any) -> Case:
    """A step of the target alone, after the passes named."""
    ctx = context(target, phase, **changes)
    gm = start_step(ctx)
    for name in done:
        run_passes(gm, ctx, (PASSES[name],), level="torch")
    return gm, ctx


def without_role(case: Case, role: str) -> Case:
    del find_role(case[0], role).meta["role"]
    return case


# --- what each must leave alone ---


def only_looked_at(target: Traced) -> Case:
    """The checks count and the taps name; neither changes a node."""
    return step(target, "decode", drafter=reading(aux_layers=(0, 1, 2)))


def keys_and_values_have_a_bias(target: Traced) -> Case:
    """A product of a latent plus a bias is no function of the latent's product alone."""
    model = tiny_target("deepseek_v3", torch.float32, num_layers=1)
    product = model.model.layers[0].self_attn.kv_b_proj
    product.bias = nn.Parameter(torch.ones(product.out_features))
    return step(trace_target(model), "decode")


def ids_come_from_the_state_already(target: Traced) -> Case:
    return step(target, "decode", "read_state")


def no_token_has_rotary_positions_of_its_own(target: Traced) -> Case:
    return step(target, "decode")


def all_requests_have_one_rotary_table(target: Traced) -> Case:
    return step(target, "decode", "read_state")


def decode_reads_its_own_tokens(target: Traced) -> Case:
    config = dataclasses.replace(HAND_CONFIG, features=RequestFeatures(prompt_embeds=True))
    return step(target, "decode", "read_state", config=config)


def its_products_are_no_modules_of_adapters(target: Traced) -> Case:
    shape = AdapterShape(num_places=2, rank=8, modules=("model.layers.0.mlp",))
    config = dataclasses.replace(HAND_CONFIG, adapters=shape)
    return step(target, "decode", "read_state", config=config)


def decode_needs_the_logits_of_all_rows(target: Traced) -> Case:
    return step(target, "decode", "read_state")


def the_last_layer_is_tapped(target: Traced) -> Case:
    """All its rows are read: only the norm behind it has rows that are not."""
    done = ("tap_hidden_states", "read_state", "narrow_logits", "insert_paged_attention")
    drafter = reading(aux_layers=(target.num_attention_layers,))
    return step(target, "prefill", *done, drafter=drafter)


def no_mask_is_computed(target: Traced) -> Case:
    return step(target, "decode", "read_state")


def attention_is_paged_already(target: Traced) -> Case:
    return step(target, "decode", "read_state", "insert_paged_attention")


def there_are_no_recurrent_layers(target: Traced) -> Case:
    return step(target, "decode", "read_state")


def nobody_named_the_logits(target: Traced) -> Case:
    return without_role(step(target, "decode", "read_state"), "logits")


def there_is_no_drafter(target: Traced) -> Case:
    config = dataclasses.replace(HAND_CONFIG, num_draft_tokens=0)
    done = ("read_state", "insert_paged_attention", "splice_acceptance")
    return step(target, "decode", *done, config=config)


def nothing_was_accepted(target: Traced) -> Case:
    return step(target, "decode", "read_state", "insert_paged_attention")


def drafts_are_a_chain(target: Traced) -> Case:
    return step(target, "decode", "read_state")


def the_head_is_the_targets(target: Traced) -> Case:
    """Its product and its argmax are no proposal of a drafter."""
    done = ("read_state", "insert_paged_attention", "splice_acceptance")
    return step(target, "decode", *done, draft_ids=torch.arange(5))


def all_nodes_differ_and_are_used(target: Traced) -> Case:
    x = torch.ones(3, 3)
    return graph_of(lambda x, y: (x + 1) * (y + 1) * (x + 1.5) * x.sum(0), x=("batch", x),
                    y=("batch", x))  # fmt: skip


def one_product_feeds_the_other(target: Traced) -> Case:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, a), b)

    x, w = torch.randn(2, 4), torch.randn(4, 4)
    return graph_of(function, x=("batch", x), a=("weight", w), b=("weight", w + 1))


def no_product_has_a_weight(target: Traced) -> Case:
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    return graph_of(lambda x, w: (x @ x.t(), x @ (w + 1).t()), x=("batch", x), w=("weight", w))


def logits_have_another_reader(target: Traced) -> Case:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(x, w)
        return logits.argmax(-1), logits.amax(-1)

    gm, ctx = graph_of(function, x=("batch", torch.randn(2, 4)), w=("weight", torch.randn(5, 4)))
    ctx.traits = dataclasses.replace(ctx.traits, fuses_heads=True)
    return gm, ctx


def rows_are_short(target: Traced) -> Case:
    gm, ctx = graph_of(lambda x: x.argmax(-1), x=("batch", torch.randn(2, 8191)))
    ctx.traits = CUDA
    return gm, ctx


def every_index_is_inside(target: Traced) -> Case:
    def function(seq_len_R: Tensor, row_B: Tensor, w: Tensor) -> Tensor:
        index = torch.where(row_B >= 0, row_B, 3).long()
        return nn.functional.embedding(seq_len_R[index].clamp(max=9), w)

    state = torch.zeros(4, dtype=torch.int32)
    return graph_of(
        function, seq_len_R=("state", state), row_B=("batch", state),
        w=("weight", torch.randn(10, 2)),
    )  # fmt: skip


def only_buffers_and_temporaries_are_written(target: Traced) -> Case:
    def function(state: Tensor, x: Tensor) -> Tensor:
        state.add_(1)
        return torch.zeros_like(x).add_(x)

    return graph_of(function, state=("state", torch.zeros(2)), x=("batch", torch.ones(3)))


def the_plan_keeps_all_weights_whole(target: Traced) -> Case:
    sharding = Sharding(size=2, wanted={"*": "whole"})
    return step(target, "decode", "read_state", "insert_paged_attention", sharding=sharding)


NEGATIVE: dict[str, Callable[[Traced], Case]] = {
    "check_markers": only_looked_at,
    "absorb_latents": keys_and_values_have_a_bias,
    "tap_hidden_states": only_looked_at,
    "read_state": ids_come_from_the_state_already,
    "read_rope_offsets": no_token_has_rotary_positions_of_its_own,
    "read_long_rope": all_requests_have_one_rotary_table,
    "read_embeds": decode_reads_its_own_tokens,
    "add_adapters": its_products_are_no_modules_of_adapters,
    "narrow_logits": decode_needs_the_logits_of_all_rows,
    "insert_cached_keys": no_mask_is_computed,
    "insert_paged_attention": attention_is_paged_already,
    "insert_recurrent_state": there_are_no_recurrent_layers,
    "splice_acceptance": nobody_named_the_logits,
    "keep_path": drafts_are_a_chain,
    "process_logits": there_is_no_drafter,
    "output_hidden_states": nothing_was_accepted,
    "output_head_input": nothing_was_accepted,
    "shift_hidden_states": there_is_no_drafter,
    "splice_draft_loop": there_is_no_drafter,
    "report_evidence": there_is_no_drafter,
    "commit_state": nothing_was_accepted,
    "trim_draft_head": the_head_is_the_targets,
    "narrow_rows": the_last_layer_is_tapped,
    "shard_weights": the_plan_keeps_all_weights_whole,
    "lower_quantized": no_product_has_a_weight,
    "cleanup": all_nodes_differ_and_are_used,
    "merge_projections": one_product_feeds_the_other,
    "fuse_head_argmax": logits_have_another_reader,
    "read_long_rows": rows_are_short,
    "prepack_linears": no_product_has_a_weight,
    "bound_positions": every_index_is_inside,
    "check_mutations": only_buffers_and_temporaries_are_written,
}
# with an error, not in silence
REFUSED = ("read_state", "splice_acceptance", "trim_draft_head", "commit_state")


@pytest.mark.parametrize("name", PASSES)
def test_there_is_a_graph_that_the_pass_leaves_alone(name, target):
    """A pass without an entry here has not been shown to leave anything alone."""
    gm, ctx = NEGATIVE[name](target)
    before, roles = code(gm), placeholders(gm)
    entry = PASSES[name]
    if name in REFUSED:
        with pytest.raises((PassError, NotSupported)):
            entry.run(Splice(gm, ctx))
    elif is_applied(entry, ctx):
        entry.run(Splice(gm, ctx))
    assert code(gm) == before
    assert placeholders(gm) == roles


def is_applied(entry: Pass, ctx: PassContext) -> bool:
    """Whether the runner would run the pass at all."""
    return entry.matches is None or entry.matches(ctx) is not None


def placeholders(gm: fx.GraphModule) -> list[str]:
    return [str(node.meta.get("role")) for node in gm.graph.find_nodes(op="placeholder")]


def test_graphs_are_kept_for_passes_that_exist():
    assert set(NEGATIVE) == set(PASSES)


def test_states_are_kept_for_recurrent_markers_alone(target):
    """Attention markers stay; a marker of which no shape is known is refused."""
    gm, ctx = step(target, "decode", "read_state")
    made = Splice(gm, ctx)
    row, position = made.roles.row, made.roles.position
    at = StatePlaces(row=row, position=position, absorbed=position, commits=row)
    before = code(gm)
    assert keep_states(made, "draft", at) == 0
    assert code(gm) == before
    logits = find_role(gm, "logits")
    with gm.graph.inserting_after(logits):
        gm.graph.call_function(torch.ops.compilespec.causal_conv, (logits, logits, None))
    del logits.meta["example"]
    with pytest.raises(PassError, match=r"causal_conv.draft.0: an argument of the marker has no"):
        keep_states(made, "draft", at)
