"""EAGLE-1 heads: the published layout, the numbers by its formulas, tokens and drafts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, NotSupported
from compilespec.methods.eagle import random_head, save_head
from compilespec.methods.registry import get_method
from tests.support.models import (
    ask_all,
    assert_nothing_held,
    greedy_reference,
    run_traffic,
    target_info,
    tiny_target,
)

MAX_SEQ_LEN = 75
VARIANTS = {
    "plain": {},
    "no_bias": {"fc_bias": False},
    "two_layers": {"num_layers": 2},
    "qkv_bias": {"qkv_bias": True},
    "qwen3": {"body": "qwen3", "head_dim": 16, "num_heads": 2, "num_kv_heads": 1},
    "own_embedding": {"own_embedding": True},
    "linear_rope": {"rope": (("factor", 4.0), ("rope_theta", 5000.0), ("rope_type", "linear"))},
}


@functools.cache
def target(family: str):
    model = tiny_target(family, num_layers=2)
    return model, target_info(model, MAX_SEQ_LEN)


def load(draft, info, **options):
    return get_method("eagle").load(draft, info, options)


class Formulas:
    """The format's definition, line by line, over the raw tensors of a checkpoint."""

    def __init__(self, directory, model: nn.Module) -> None:
        self.raw = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self.head = model.get_output_embeddings().weight.detach()
        own = self.weights.get("embed_tokens.weight")
        self.embedding = model.get_input_embeddings().weight.detach() if own is None else own
        self.factor = (self.raw["rope_scaling"] or {}).get("factor", 1.0)

    def linear(self, x: Tensor, name: str) -> Tensor:
        weights = self.weights
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.get(f"{name}.weight")
        return x if weight is None else functional.rms_norm(
            x, x.shape[-1:], weight, self.raw["rms_norm_eps"]
        )  # fmt: skip

    def attention(self, x_TD: Tensor, name: str, first_position: int) -> Tensor:
        size = self.raw["head_dim"]
        places = torch.arange(first_position, first_position + len(x_TD)).double() / self.factor
        angle = places[:, None] * self.raw["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        turn = torch.polar(torch.ones_like(angle), angle)

        def heads(kind: str) -> Tensor:
            return self.linear(x_TD, f"{name}.{kind}_proj").unflatten(-1, (-1, size)).movedim(1, 0)

        def rotated(y_NTH: Tensor) -> Tensor:
            turned = torch.complex(*y_NTH.chunk(2, -1)) * turn
            return torch.cat([turned.real, turned.imag], -1)

        query = rotated(self.norm(heads("q"), f"{name}.q_norm"))
        key, value = rotated(self.norm(heads("k"), f"{name}.k_norm")), heads("v")
        group = len(query) // len(key)
        score = query @ key.repeat_interleave(group, 0).mT / size**0.5
        score = score.masked_fill(torch.ones_like(score[0]).triu(1).bool(), -torch.inf)
        mixed = score.softmax(-1) @ value.repeat_interleave(group, 0)
        return self.linear(mixed.movedim(0, 1).flatten(1), f"{name}.o_proj")

    def __call__(self, ids_T: Tensor, feature_TD: Tensor, first_position: int = 0) -> Tensor:
        """Row t: feature of position t, token at t+1; returns h [T, D]."""
        h = self.linear(torch.cat([self.embedding[ids_T], feature_TD], -1), "fc")
        for index in range(self.raw["num_hidden_layers"]):
            layer = f"layers.{index}"
            normed = self.norm(h, f"{layer}.input_layernorm") if index else h
            h = h + self.attention(normed, f"{layer}.self_attn", first_position)
            x = self.norm(h, f"{layer}.post_attention_layernorm")
            gate = functional.silu(self.linear(x, f"{layer}.mlp.gate_proj"))
            h = h + self.linear(
                gate * self.linear(x, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"
            )
        return h

    @torch.no_grad()
    def drafts(self, model: nn.Module, tokens: list[int], count: int) -> list[int]:
        """What follows `tokens`: everything computed again at every draft, from true features."""
        output = model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        feature_TD, ids = output.hidden_states[-1][0], list(tokens[1:])
        for _ in range(count):
            h = self(torch.tensor(ids), feature_TD)
            ids.append(int((self.head @ h[-1]).argmax()))
            feature_TD = torch.cat([feature_TD, h[-1:]])
        return ids[-count:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_and_numbers(tmp_path, variant):
    model, info = target("llama")
    head = random_head(info, seed=1, **VARIANTS[variant])
    loaded = load(save_head(head, tmp_path), info)
    assert dataclasses.replace(loaded.config, aux_source=head.config.aux_source) == head.config
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.lm_head.weight is info.lm_head
    assert (loaded.embed_tokens.weight is info.embedding) == (variant != "own_embedding")
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"} & names
    assert "\n" not in loaded.describe()

    ids, feature = torch.randint(97, (9,)), 3 * torch.randn(9, 48, dtype=torch.float64)
    wanted = Formulas(tmp_path, model)(ids, feature, first_position=4)
    places = torch.arange(4, 13, dtype=torch.int32)[None]
    hidden, recycled = loaded(ids.int()[None], places, loaded.combine(feature[None]))
    torch.testing.assert_close(hidden[0], wanted, atol=1e-6, rtol=1e-6)  # angles are float32
    assert torch.equal(hidden, recycled)
    tokens = loaded.propose(hidden[0])
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens.long(), (wanted @ info.lm_head.T).argmax(-1))


def test_the_authors_files_are_read_as_they_are(tmp_path):
    """No `bias` key, a pytorch_model.bin with what training left and a copy of the embedding."""
    _, info = target("llama")
    head = random_head(info, seed=1)
    save_head(head, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("bias", "qkv_bias", "attention_bias", "model_type", "head_dim", "rope_theta"):
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    tensors["embed_tokens.weight"] = info.embedding.clone()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    loaded = load(tmp_path, info)
    assert loaded.config.fc_bias
    assert dict(loaded.config.rope)["rope_theta"] == 10000.0
    assert loaded.embed_tokens.weight is info.embedding  # the target's values: kept once
    assert torch.equal(loaded.fc.bias, head.fc.bias)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle", "model": raw}))
    assert load(tmp_path, info).config == loaded.config


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"drop": "layers.0.mlp.up_proj.weight"}, CheckpointError, "missing: layers.0.mlp.up_proj"),
        ({"add": "layers.0.input_layernorm.weight"}, CheckpointError, "unexpected: layers.0.input"),
        ({"add": "norm.weight"}, CheckpointError, "unexpected: norm.weight"),
        ({"drop": "fc.bias"}, CheckpointError, "missing: fc.bias"),
        ({"drop": "fc.weight"}, CheckpointError, "is not an EAGLE checkpoint"),
        ({"add": "midlayer.hidden_norm.weight"}, CheckpointError, "give spec='eagle3'"),
        ({"add": "layers.0.mlp.experts.0.up_proj.weight"}, NotSupported, "mixture-of-experts"),
        ({"config": {"bias": False}}, CheckpointError, "unexpected: fc.bias"),
        ({"config": {"qkv_bias": True}}, CheckpointError, "missing: .*k_proj.bias"),
        ({"config": {"vocab_size": 90}}, DraftMismatch, "the draft of another target"),
        ({"config": {"hidden_size": 24}}, DraftMismatch, "width 24"),
        ({"config": {"model_type": "cohere"}}, NotSupported, "body 'cohere'"),
        ({"config": {"speculators_model_type": "eagle"}}, NotSupported, "authors' layout"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, change, error, words):
    _, info = target("llama")
    save_head(random_head(info), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(change.get("drop"), None)
    if "add" in change:
        tensors[change["add"]] = torch.zeros(48)
    save_file(tensors, path)
    raw = json.loads((tmp_path / "config.json").read_text())
    if "model_type" in change.get("config", {}):
        raw["architectures"] = ["EagleCohereForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change.get("config", {})}))
    with pytest.raises(error, match=words) as caught:
        load(tmp_path, info)
    assert "\n" not in str(caught.value)


def test_fields_and_target_are_checked():
    _, info = target("llama")
    with pytest.raises(InvalidOption, match="body must be"):
        random_head(info, body="gpt2")
    with pytest.raises(DraftMismatch, match="another target"):
        load(random_head(info), dataclasses.replace(info, vocab_size=90))


# --- in the engine ---

SIZES = ((5, 11), (1, 22), (40, 33), (17, 8), (64, 11), (70, 5), (2, 9), (30, 20), (9, 1), (3, 14))


@functools.cache
def asked(family):
    return tuple(ask_all(target(family)[0], SIZES))


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 1),
        ("qwen3_moe", 3),
        ("llama", 5),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.slow),
        pytest.param("llama", 3, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 5, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_plain_decoding(tmp_path, family, count):
    """Requests join and leave in batches of 1 to 8; prompts are cut into chunks of 16."""
    model, info = target(family)
    directory = save_head(random_head(info, seed=count), tmp_path)
    with compilespec.compile(
        model, spec="eagle", draft=directory, num_draft_tokens=count, backend="eager",
        max_batch_size=8, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16, buckets=[1, 2, 5, 8],
    ) as engine:  # fmt: skip
        requests = run_traffic(engine, asked(family), (1, 2, 4, 8))
        for request, ask in zip(requests, asked(family), strict=True):
            assert request.output_token_ids == list(ask.tokens), f"prompt of {len(ask.prompt)}"
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0
        assert any("eagle llama x1" in note for note in engine.plan()["why"])


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_drafts_are_those_of_the_formulas_at_every_step(tmp_path, family):
    """The head runs over its cache, the formulas over everything again.  The head is the target's
    own bigram guess, so that drafts are accepted and rejected."""
    model, info = target(family)
    head = random_head(info, seed=3)
    directory = save_head(head, tmp_path)
    formulas, count = Formulas(directory, model), 3
    prompts = [[11, 5, 60, 7, 8, 9, 10], [42], [33, 34, 80, 81, 3, 3, 3, 90, 12, 44, 20, 21]]
    with compilespec.compile(
        model, spec="eagle", draft=directory, num_draft_tokens=count, backend="eager",
        max_batch_size=3, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=8,
    ) as engine:  # fmt: skip
        requests = [
            engine.submit(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True))
            for prompt in prompts
        ]
        num_checked = 0
        while engine.has_work:
            engine.step()
            for request in requests:
                if request.finished or not request.output_token_ids:
                    continue
                drafts = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
                tokens = [*request.prompt_token_ids, *request.output_token_ids]
                assert drafts == formulas.drafts(model, tokens, count)
                num_checked += 1
        assert num_checked >= 15
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output_token_ids == greedy_reference(model, prompt, 9)


def test_a_head_may_lie_beside_its_target(tmp_path):
    model, info = target("llama")
    copy.deepcopy(model).save_pretrained(tmp_path)
    save_head(random_head(info), tmp_path / "eagle")
    program = compilespec.trace(tmp_path, "eagle", dtype=torch.float64, max_seq_len=64)
    assert program.config.num_draft_tokens == 3
    shared = [name for name in program.weights if name.startswith("draft.lm_head")]
    assert not shared  # the target's own, counted once
