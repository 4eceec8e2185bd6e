"""Hidden-state taps against forward hooks, bitwise (T14), and the drafter's use of them (T15)."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, fx, nn

from compilespec.errors import PassError
from compilespec.methods.eagle3 import random_head
from compilespec.methods.registry import get_method
from compilespec.passes.graph.nodes import find_role, set_outputs
from compilespec.passes.graph.retrace import start_step
from compilespec.passes.order import SPLICE_PASSES, PassContext, run_passes
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.tap_hidden_states import tap_hidden_states
from compilespec.program import ProgramConfig
from compilespec.tracing.attention import marked_attention
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.hand_graphs import reading
from tests.support.hooks import decoder_layers, hook_states
from tests.support.models import FAMILIES, VOCAB, call_traced, tiny_target
from tests.support.untouched import check_left_alone, step

NUM_LAYERS = 3
NUM_VERIFY_TOKENS = 3
CONFIG = ProgramConfig(
    num_draft_tokens=NUM_VERIFY_TOKENS - 1, max_batch_size=2, max_seq_len=32, max_prefill_tokens=32,
    block_size=4, num_blocks=16, vocab_size=VOCAB, dtype=torch.float32,
    device=torch.device("cpu"),
)  # fmt: skip


def short_target(family: str) -> nn.Module:
    """The family's tiny model, float32, cut to three layers."""
    model = tiny_target(family, torch.float32)
    del decoder_layers(model)[NUM_LAYERS:]
    return model


def context(model: nn.Module, aux_layers: tuple[int, ...]) -> PassContext:
    return PassContext(
        phase="decode", config=CONFIG, capabilities=get_method("eagle3").capabilities,
        target=trace_target(model), draft={}, drafter=reading(aux_layers=aux_layers),
    )  # fmt: skip


def run(gm: fx.GraphModule, ctx: PassContext, **arguments: Tensor) -> tuple[Tensor, ...]:
    """Call a graph by the roles of its inputs."""
    gm.graph.lint()
    gm.recompile()
    roles = [node.meta["role"] for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        return gm(*[arguments[r] if r in arguments else ctx.weights[r] for r in roles])


@contextmanager
def same_attention(model: nn.Module, monkeypatch):
    """Let the model's own forward attend through the operator that the graph holds: all else is its
    own code.  (Attention sums in another order would hide a wrong tap behind a tolerance.)"""

    def sdpa(query, key, value, is_causal):
        assert is_causal
        scale = query.shape[-1] ** -0.5
        output = torch.ops.compilespec.attention(query, key, value, scale, 0, 0.0, None)
        return output.transpose(1, 2)

    with monkeypatch.context() as patch, marked_attention(model):
        patch.setattr(nn.functional, "scaled_dot_product_attention", sdpa)
        yield


def call(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    if hasattr(model, "config"):
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return model(ids)


def batch(num_requests: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCAB, (num_requests, NUM_VERIFY_TOKENS), dtype=torch.int32)
    positions = torch.arange(NUM_VERIFY_TOKENS, dtype=torch.int32).expand_as(ids).contiguous()
    return ids, positions


@pytest.mark.parametrize("family", [*FAMILIES, "plain"])
def test_taps_equal_forward_hooks(family, monkeypatch):
    model = short_target(family)
    every = tuple(range(NUM_LAYERS + 1))
    ctx = context(model, every)
    gm = start_step(ctx)
    assert tap_hidden_states(Splice(gm, ctx)) == len(every)
    outputs = {role: find_role(gm, role) for role in ["logits", *(f"aux.{k}" for k in every)]}
    set_outputs(gm, outputs)
    for num_requests in (1, 5):  # neither is the size it was traced with
        ids, positions = batch(num_requests)
        logits, *taps = run(gm, ctx, input_ids=ids, position_ids=positions)
        with same_attention(model, monkeypatch):
            states = hook_states(model, lambda ids=ids, at=positions: call(model, ids, at))
        assert len(states) == len(taps)
        for k, (tap, state) in enumerate(zip(taps, states, strict=True)):
            assert torch.equal(tap, state), f"hs[{k}]"
        untouched = hook_states(model, lambda ids=ids, at=positions: call(model, ids, at))
        for tap, state in zip(taps, untouched, strict=True):
            torch.testing.assert_close(tap, state, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(logits, call(model, ids, positions), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return short_target("llama")


def test_aux_is_the_concatenation_in_the_order_asked_for(llama, monkeypatch):
    """The role `aux`, in an order that is not ascending, paired with the target's tokens."""
    aux_layers = (2, 0, 3)
    ctx = context(llama, aux_layers)
    gm = start_step(ctx)
    names = [entry.name for entry in SPLICE_PASSES]
    upto = SPLICE_PASSES[: names.index("shift_hidden_states") + 1]
    run_passes(gm, ctx, upto, level="torch", disabled=frozenset({"insert_paged_attention"}))
    set_outputs(gm, {role: find_role(gm, role) for role in ("aux", "draft_ids", "target")})
    ids, positions = batch(2)
    state = {
        name: torch.full(spec.shape, spec.fill, dtype=spec.dtype)
        for name, spec in ctx.buffers.items()
    }
    state["tokens_RS"][:2] = ids
    row_B = torch.tensor([0, 1], dtype=torch.int32)
    aux, draft_ids, target = run(gm, ctx, row_B=row_B, **state)
    with same_attention(llama, monkeypatch):
        states = hook_states(llama, lambda: call(llama, ids, positions))
        with torch.no_grad():
            assert torch.equal(target, call(llama, ids, positions).argmax(-1).to(torch.int32))
    assert torch.equal(aux, torch.cat([states[k] for k in aux_layers], -1))
    assert torch.equal(draft_ids, target)


def test_combine_and_the_drafters_passes(llama):
    """T15: [B, S, A*D] of true features through `combine`, then the pass; later passes recycle."""
    traced = trace_target(llama)
    info = describe_target(traced, load_target(llama))
    drafter = random_head(
        info, num_draft_tokens=2, aux_layers=(0, 2, 3), norm_before_fc=True
    ).eval()
    calls = drafter.capture(CONFIG, info)
    ids, positions = batch(2)
    aux = torch.randn(2, NUM_VERIFY_TOKENS, 3 * info.hidden_size)
    with torch.no_grad():
        hidden = drafter.combine(aux)
        (got,) = call_traced(calls["combine"], aux=aux)
        assert torch.equal(got, hidden)
        expected = drafter(ids, positions, hidden)
        first = {"input_ids": ids, "position_ids": positions, "hidden": hidden}
        assert all(map(torch.equal, call_traced(calls["forward"], **first), expected))
        recycled = expected[1][:, -1:]
        again = drafter(ids[:, :1], positions[:, 2:], recycled)
        step = {"input_ids": ids[:, :1], "position_ids": positions[:, 2:], "hidden": recycled}
        assert all(map(torch.equal, call_traced(calls["forward"], **step), again))
        tokens, logits = call_traced(calls["propose"], head_input=again[0][:, 0])
        assert torch.equal(logits, drafter.logits(again[0][:, 0]))
        assert torch.equal(tokens, drafter.propose(again[0][:, 0]))
        assert tokens.dtype == torch.int32


def test_a_layer_without_one_residual_stream_is_refused(llama):
    ctx = context(llama, (NUM_LAYERS + 1,))
    gm = start_step(ctx)
    with pytest.raises(PassError, match=r"tap_hidden_states: .* entering layer 4, found none"):
        tap_hidden_states(Splice(gm, ctx))


def test_no_aux_layers_taps_nothing(llama):
    ctx = context(llama, ())
    gm = start_step(ctx)
    nodes = len(gm.graph.nodes)
    assert tap_hidden_states(Splice(gm, ctx)) == 0
    assert len(gm.graph.nodes) == nodes
    assert not any(str(node.meta.get("role", "")).startswith("aux") for node in gm.graph.nodes)


def test_taps_are_names_and_change_no_node() -> None:
    check_left_alone("tap_hidden_states", step("decode", drafter=reading(aux_layers=(0, 1, 2))))
