"""What proves to be latent attention, what does not and why, and what becomes of it."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import compilespec
from compilespec.inspect.call_pairs import call_pairs
from compilespec.inspect.compare import compare
from compilespec.methods.registry import get_method
from compilespec.passes.context import PassContext
from compilespec.passes.graph.retrace import start_step
from compilespec.passes.references.fragments import run_fragment
from compilespec.passes.splice.absorb_latents import absorb_calls, absorb_latents, describe_latents
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.expansion import Expansion
from compilespec.passes.splice.insert_paged_attention import leading_part
from compilespec.program import Traced, markers
from compilespec.tracing.capture import EXAMPLE_SHAPE, trace_call
from compilespec.tracing.target import trace_target
from tests.support.hand_graphs import HAND_CONFIG, reading
from tests.support.models import tiny_target
from tests.support.untouched import check_left_alone, step

HEAD_LINEAR = torch.ops.compilespec.head_linear.default
WIDTH, HEADS, RANK, NOPE, ROPE, VALUE = 20, 3, 7, 5, 4, 6


class Latent(nn.Module):
    """One layer of attention over a latent, in one of many spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.query = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(WIDTH, RANK + ROPE, bias=False)
        self.up = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=spelling == "bias")
        self.other = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.to(torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query = self.query(hidden).view(batch, length, HEADS, -1).transpose(1, 2)
        latent, rope = self.down(hidden).split([RANK, ROPE], -1)
        rope = rope.view(batch, 1, length, ROPE).tanh()
        key, value = getattr(self, f"_{self.spelling}", self._cat)(latent.sin(), rope)
        window, softcap, sinks = 0, 0.0, None
        if self.spelling == "windowed":
            window, softcap, sinks = 3, 5.0, self.query.weight[:HEADS, 0]
        return torch.ops.compilespec.attention(query, key, value, 0.3, window, softcap, sinks)

    def _heads(self, latent: Tensor) -> Tensor:
        """The product by head, [B, N, T, NOPE + VALUE]."""
        weight = self.up
        if self.spelling == "computed":
            product = nn.functional.linear(latent, self.up.weight * 2)
        else:
            product = weight(latent)
        return product.view(*latent.shape[:2], HEADS, NOPE + VALUE).transpose(1, 2)

    def _cat(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._heads(latent)
        rope = rope.expand(-1, HEADS, -1, -1)
        return torch.cat([heads[..., :NOPE], rope], -1), heads[..., NOPE:]

    def _rope_first(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        value, key = self._heads(latent).split([VALUE, NOPE], dim=-1)
        return torch.cat([rope.expand(-1, HEADS, -1, -1), key], -1), value

    def _written(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """As DeepSeek's own code puts a key together."""
        key, value = torch.split(self._heads(latent), [NOPE, VALUE], dim=-1)
        whole = rope.new_empty(*key.shape[:3], NOPE + ROPE)
        whole[:, :, :, :NOPE] = key
        whole[:, :, :, NOPE:] = rope
        return whole, value

    def _before_heads(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Split first, then exchanged."""
        parts = self.up(latent).reshape(*latent.shape[:2], HEADS, -1).split([NOPE, VALUE], -1)
        key, value = (part.permute(0, 2, 1, 3) for part in parts)
        return torch.cat([key, rope.expand_as(key[..., :ROPE])], -1), value.contiguous()

    def _no_rope(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._heads(latent)
        return torch.cat([heads[..., :NOPE], heads[..., :ROPE]], -1), heads[..., NOPE:]

    def _two_products(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        key, _ = self._cat(latent, rope)
        value = self.other(latent).view(*latent.shape[:2], HEADS, -1).transpose(1, 2)
        return key, value[..., NOPE:]

    def _turned(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """The part of the product that depends on the position."""
        heads = self._heads(latent)
        key = heads[..., :NOPE] * rope[..., :1]
        return torch.cat([key, rope.expand(-1, HEADS, -1, -1)], -1), heads[..., NOPE:]

    def _reversed(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._heads(latent)
        rope = torch.cat([rope, rope * 2, rope * 3], 1)  # each head has its own
        return torch.cat([heads[..., :NOPE], rope], -1), heads[..., NOPE:]

    def _gap(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        key, value = torch.split(self._heads(latent), [NOPE, VALUE], dim=-1)
        whole = rope.new_zeros(*key.shape[:3], NOPE + ROPE)
        whole[..., :NOPE].copy_(key)
        whole[..., NOPE + 1 :].copy_(rope[..., 1:])
        return whole, value

    def _overwritten(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self._cat(latent, rope)
        rope.add_(1)
        return key, value


def traced(spelling: str) -> Traced:
    torch.manual_seed(1)
    module = Latent(spelling)
    hidden = torch.randn(*EXAMPLE_SHAPE, WIDTH, dtype=torch.float64)

    def call(hidden: Tensor) -> tuple[Tensor]:
        return (module(hidden),)

    return trace_call(module, call, {"hidden": (hidden, (0, 1))}, name="draft")


@pytest.mark.parametrize("spelling", ["cat", "rope_first", "written", "before_heads", "windowed"])
def test_a_proved_layer_attends_to_its_latents_and_gives_the_same(spelling):
    call = traced(spelling)
    before = call.graph_module.code
    calls, found = absorb_calls({"x": call})
    assert calls["x"] is not call
    assert call.graph_module.code == before, "the capture stays as it was"
    (expansion,) = found.values()
    assert isinstance(expansion, Expansion)
    assert (expansion.num_cached, expansion.num_expanded) == (RANK + ROPE, 3 * (5 + 4 + 6))
    (marker,) = markers(calls["x"].graph_module)
    key, value = marker.args[1:3]
    assert key.meta["example"][0] == (None, 1, None, RANK + ROPE)
    assert leading_part(value, key) == RANK
    left = {str(node.target) for node in calls["x"].graph_module.graph.nodes}
    assert not left & {"copy_", str(operator.setitem), "expand"}, "nothing is expanded any more"
    hidden = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    (got,), (want,) = (run_fragment(c, {"hidden": hidden}) for c in (calls["x"], call))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ("bias", "has a bias"),
        ("computed", "quantized, adapted or computed"),
        ("no_rope", "more than a part of the product"),
        ("reversed", "more than a part of the product"),
        ("overwritten", "add_ writes in place"),
        ("two_products", None),
        ("turned", None),
        ("gap", None),
    ],
)
def test_a_layer_without_a_proof_stays_as_it_is(spelling, reason):
    call = traced(spelling)
    calls, found = absorb_calls({"x": call})
    assert calls["x"] is call
    assert list(found) == ([] if reason is None else ["drafter x.0"])
    if reason is not None:
        assert reason in found["drafter x.0"]


def test_expanded_latents_are_the_keys_and_values_of_the_layer():
    call, seen = traced("rope_first"), {}
    calls, found = absorb_calls({"x": call})
    hidden = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    for name, one in (("before", call), ("after", calls["x"])):

        def note(layer: int, args: tuple[Any, ...], name: str = name) -> Tensor:
            seen[name] = args[1:3]
            return args[0].new_zeros(2, 9, HEADS, args[2].shape[-1])

        run_fragment(one, {"hidden": hidden}, {"attention": note})
    expansion = found["drafter x.0"]
    assert isinstance(expansion, Expansion)
    expanded = expansion.expand(seen["after"][0].squeeze(1), call.weights[expansion.weight])
    for got, want in zip(expanded, seen["before"], strict=True):
        torch.testing.assert_close(got.transpose(1, 2), want)


def test_layers_that_a_drafter_reads_stay_as_they_are():
    ctx = PassContext(
        phase="decode", config=HAND_CONFIG, capabilities=get_method("none").capabilities,
        target=trace_target(tiny_target("glm4_moe_lite", torch.float32, num_layers=2)), draft={},
        drafter=reading(kv_layers=(1,)),
    )  # fmt: skip
    gm = start_step(ctx)
    assert absorb_latents(Splice(gm, ctx)) == 1
    first, second = ctx.latents["target.0"], ctx.latents["target.1"]
    assert isinstance(first, Expansion)
    assert second == "a drafter reads its keys and values"
    heads = [marker.args[1].meta["example"][0][1] for marker in markers(gm)]
    assert heads == [1, 4]


def test_a_fault_in_a_drafters_call_is_seen_beside_its_capture():
    """What `verify` compares; wrong drafts cost acceptance alone, and no token shows them."""
    call = traced("cat")
    calls, _ = absorb_calls({"forward": call, "propose": call})
    calls["propose"] = call  # one that has nothing to absorb
    ctx: Any = SimpleNamespace(draft=calls, config=SimpleNamespace(device=torch.device("cpu")))
    ((name, _, (got,), (want,)),) = call_pairs(ctx)
    assert name == "forward"
    assert compare(got, want, bound=1e-12) is None
    graph = calls["forward"].graph_module.graph
    first = next(iter(graph.find_nodes(op="call_function", target=HEAD_LINEAR)))
    columns = first.args[1]
    columns.args = (columns.args[0], (slice(None), slice(VALUE, VALUE + NOPE)))  # halves swapped
    calls["forward"].graph_module.recompile()
    ((_, _, (got,), (want,)),) = call_pairs(ctx)
    assert compare(got, want, bound=1e-12) is not None


def test_deepseek_v3_keeps_a_latent_and_a_rope_key_of_each_token():
    """Its own shape, on the meta device: (512 + 64) numbers of two bytes a token and layer."""
    config = transformers.DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    program = compilespec.trace(
        model.eval(), "none", keep_graphs=False, max_seq_len=256, max_batch_size=2
    )
    assert program.cache_bytes_per_token == 2 * (512 + 64) * 2
    caches = {b.name: b.shape[2:] for b in program.buffers if b.kind == "cache"}
    assert caches == {f"cache.target.{layer}.key": (1, 576) for layer in (0, 1)}
    text = "target, layers 0 to 1: cached as latents, 576 numbers a token instead of 40960"
    assert text in program.notes


def test_the_plan_names_layers_by_what_became_of_them():
    long = Expansion(
        weight="w", num_heads=3, width=11, rank=7, key=(0, 5), value=(5, 11),
        parts=((5, True), (4, False)),
    )  # fmt: skip
    found = {"target.0": long, "target.1": long, "target.2": "it has a bias", "target.4": long}
    assert list(describe_latents(found)) == [
        "target, layers 0, 1, 4: cached as latents, 11 numbers a token instead of 45",
        "target, layer 2: cached as keys and values, because it has a bias",
    ]


def test_keys_and_values_with_a_bias_stay() -> None:
    """A product of a latent plus a bias is no function of the latent's product alone."""
    model = tiny_target("deepseek_v3", torch.float32, num_layers=1)
    product = model.model.layers[0].self_attn.kv_b_proj
    product.bias = nn.Parameter(torch.ones(product.out_features))
    check_left_alone("absorb_latents", step("decode", target=trace_target(model)))
