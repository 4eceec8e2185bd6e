"""What a capture holds, and what it leaves as it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from compilespec.errors import NoPositionInput, TraceError
from compilespec.program import markers, module_path
from compilespec.tracing.capture import trace_call
from compilespec.tracing.naming import source_line
from compilespec.tracing.target import trace_target
from tests.support.models import FAMILIES, VOCAB, PlainBlock, PlainModel, call_traced, tiny_target

WINDOWED = {"mistral", "gemma2", "gpt_oss"}


def short_target(family: str) -> nn.Module:
    """The family's tiny model, float32, cut to two layers."""
    model = tiny_target(family, torch.float32)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    del max(lists, key=len)[2:]
    return model


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return short_target("llama")


@pytest.fixture(scope="module")
def captured(llama):
    return trace_target(llama)


def run(traced, **arguments: Tensor) -> Tensor:
    (logits,) = call_traced(traced, **arguments)
    return logits


def test_one_graph_with_named_inputs(llama, captured):
    parameters = {f"target.{name}" for name, _ in llama.named_parameters()}
    assert parameters <= set(captured.weights)
    for name, weight in captured.weights.items():
        known = dict(llama.named_parameters()) | dict(llama.named_buffers())
        assert weight.data_ptr() == known[name.removeprefix("target.")].data_ptr()
    arguments = [entry.name for entry in captured.inputs if entry.kind == "argument"]
    assert sorted(arguments) == ["input_ids", "position_ids"]
    graph = captured.graph_module.graph
    assert {node.op for node in graph.nodes} <= {
        "placeholder",
        "call_function",
        "call_method",
        "output",
        "get_attr",
    }  # fmt: skip  (no call_module: nothing is left outside of the graph)
    assert captured.num_attention_layers == 2
    assert "2 attention layers" in str(captured)


@pytest.mark.parametrize("shape", [(2, 4), (5, 1), (1, 31)], ids="{0[0]}x{0[1]}".format)
def test_the_graph_computes_the_forward_at_every_shape(llama, captured, shape):
    """Decode, a single draft step, prefill: instances of one capture."""
    ids = torch.randint(3, VOCAB, shape, dtype=torch.int32)
    positions = torch.arange(shape[1], dtype=torch.int32).expand_as(ids).contiguous()
    logits = run(captured, input_ids=ids, position_ids=positions)
    with torch.no_grad():
        expected = llama(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_nodes_know_their_module_and_source_line(llama, captured):
    paths = {name for name, _ in llama.named_modules()} | {""}
    nodes = [n for n in captured.graph_module.graph.nodes if n.op.startswith("call")]
    assert {module_path(node) for node in nodes} <= paths
    assert [module_path(node) for node in markers(captured.graph_module)] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    lines = {source_line(node) for node in nodes if module_path(node).startswith("model.layers")}
    assert lines
    assert "source line unknown" not in lines
    linear = next(n for n in nodes if module_path(n) == "model.layers.1.mlp.gate_proj")
    assert re.match(r"modeling_llama.py:\d+: down_proj = ", source_line(linear))
    assert linear.meta["custom"]["class"] == "Linear"
    assert all(node.meta["custom"]["pass"] == "trace" for node in nodes)


def test_plain_modules_alike():
    model = PlainModel(num_layers=2).eval()
    traced = trace_target(model)
    found = markers(traced.graph_module)
    assert [module_path(node) for node in found] == ["blocks.0", "blocks.1"]
    assert all(source_line(node).startswith("models.py:") for node in found)
    known = {line for *_, line in PlainBlock.forward.__code__.co_lines()}
    assert {int(source_line(node).split(":")[1]) for node in found} <= known
    assert all(list(node.args[3:]) == [12**-0.5, 0, 0.0, None] for node in found)
    assert {name for name in traced.weights if "captured" not in name} == {
        f"target.{name}" for name, _ in model.named_parameters()
    }
    assert [e.name for e in traced.inputs if e.kind == "argument"] == ["input_ids", "position_ids"]


class PlainWithPositions(PlainModel):
    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def test_a_position_argument_under_another_name_is_found():
    traced = trace_target(PlainWithPositions(num_layers=1).eval())
    ids = torch.zeros(2, 3, dtype=torch.int32)
    first = run(traced, input_ids=ids, position_ids=ids)
    assert not torch.equal(first, run(traced, input_ids=ids, position_ids=ids + 5))


def test_an_arange_over_the_tokens_becomes_the_positions():
    model = PlainModel(num_layers=1).eval()
    traced = trace_target(model)
    ids = torch.randint(3, VOCAB, (3, 4), dtype=torch.int32)
    positions = torch.arange(4, dtype=torch.int32).expand_as(ids).contiguous()
    with torch.no_grad():
        expected = model(ids)
    logits = run(traced, input_ids=ids, position_ids=positions)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    moved = run(traced, input_ids=ids, position_ids=positions + 7)
    assert not torch.allclose(moved, logits)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_model_is_left_as_it_was(training):
    model = short_target("qwen2").train(training)
    config = model.config
    config._attn_implementation = "eager"
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    ids = torch.randint(3, VOCAB, (2, 6))
    with torch.no_grad():
        before = model(ids).logits
    trace_target(model)
    assert config._attn_implementation == "eager"
    assert {name: module.training for name, module in model.named_modules()} == flags
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_the_model_is_left_as_it_was_after_an_error(monkeypatch):
    model = short_target("llama")
    model.config._attn_implementation = "sdpa"
    model.train()

    def broken(hidden: Tensor) -> Tensor:
        return hidden if hidden.sum().item() > 0 else -hidden

    monkeypatch.setattr(model.model.norm, "forward", broken)
    with pytest.raises(TraceError):
        trace_target(model)
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert model.model.layers[1].training


def test_many_traces_in_one_process():
    """Dynamo gives up on a function after 8 recompiles: ours are captures of one call each."""
    limit = torch._dynamo.config.recompile_limit
    model = nn.Linear(4, 4)

    def call(x: Tensor) -> Tensor:
        return model(x)

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for size in range(2, limit + 5):
            traced = trace_call(model, call, {"x": (torch.zeros(3, size, 4), (0,))}, name="linear")
            assert sorted(traced.weights) == ["linear.bias", "linear.weight"]


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gpt_neox", "qwen3"])
def test_attention_parameters_arrive_as_the_model_gave_them(family):
    model = short_target(family)
    config = model.config
    traced = trace_target(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * 2
    if family == "mistral":  # its window is for every layer
        layer_types = ["sliding_attention"] * 2
    found = markers(traced.graph_module)
    assert len(found) == 2
    for layer, marker in enumerate(found):
        _, _, _, scale, window, softcap, sinks = marker.args
        assert isinstance(scale, float)
        assert scale == pytest.approx(getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5)
        slides = family in WINDOWED and layer_types[layer] == "sliding_attention"
        assert window == (config.sliding_window if slides else 0)
        assert softcap == (getattr(config, "attn_logit_softcapping", None) or 0.0)
        if family == "gpt_oss":
            assert sinks.meta["role"] == f"target.model.layers.{layer}.self_attn.sinks"
        else:
            assert sinks is None
    if family in ("gemma2", "gpt_oss"):
        assert {marker.args[4] for marker in found} == {0, config.sliding_window}
    if family == "gemma2":
        assert found[0].args[5] > 0


def test_tied_embeddings_are_one_input():
    config = FAMILIES["llama"]()
    config.tie_word_embeddings, config.num_hidden_layers = True, 1
    model = transformers.LlamaForCausalLM(config).eval()
    traced = trace_target(model)
    vocab_sized = [name for name, w in traced.weights.items() if w.shape[0] == VOCAB]
    assert vocab_sized == ["target.model.embed_tokens.weight"]


class NoPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        plain = PlainModel(num_layers=1)
        self.tokens, self.block, self.head = plain.tokens, plain.blocks[0], plain.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(ids)))


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids) + position_ids[..., None])


class Masked(NoPositions):
    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.tokens(ids) + position_ids[..., None]
        heads = hidden.unflatten(-1, (4, 12)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.head(mixed.transpose(1, 2).flatten(2))


class Breaking(PlainModel):
    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        if hidden.sum().item() > 0:  # the line that the error must name
            hidden = -hidden
        return self.head(self.blocks[0](hidden))


def test_what_cannot_be_traced_says_why():
    with pytest.raises(NoPositionInput, match=r"NoPositions.*add a position_ids argument"):
        trace_target(NoPositions().eval())
    with pytest.raises(TraceError, match="NoAttention has no attention that can be cached"):
        trace_target(NoAttention().eval())
    with pytest.raises(TraceError, match=r"got is_causal=False.*; test_trace.py:\d+: mixed ="):
        trace_target(Masked().eval())
    with pytest.raises(TraceError, match="one graph") as caught:
        trace_target(Breaking(num_layers=1).eval())
    message = str(caught.value)
    source = Path(__file__).read_text().splitlines()
    line = next(
        i for i, text in enumerate(source, 1) if "the line that the error must name" in text
    )
    assert "\n" not in message
    assert f"test_trace.py:{line}" in message
    assert "Breaking" in message
