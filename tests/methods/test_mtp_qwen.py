"""MTP heads inside checkpoints of Qwen3-Next and Qwen3.5: target and drafter from one folder."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.cli import main
from compilespec.errors import CheckpointError
from compilespec.methods.mtp.layout import dequantise
from compilespec.methods.mtp.load import load_drafter
from compilespec.tracing.load import load_target
from compilespec.tracing.target_info import TargetInfo
from tests.support.models import (
    VOCAB,
    Ask,
    ask_all,
    assert_nothing_held,
    poison,
    run_traffic,
    target_info,
)
from tests.support.mtp import recycled_drafts
from tests.support.qwen_mtp import FAMILIES, MAX_POSITIONS, mtp_tensors, publish
from tests.support.toy_tokenizer import byte_level_tokenizer
from tests.support.windowed import fresh_drafts

ORACLE = Path(__file__).parents[1] / "data" / "oracles" / "b_mtp_qwen3_next"


# --- against the speculators library ---


@pytest.fixture(scope="module", params=["speculators", "qwen3_next"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    native = load_file(ORACLE / "native.safetensors")
    folder = ORACLE
    if request.param == "qwen3_next":
        folder = tmp_path_factory.mktemp("native")
        raw = json.loads((ORACLE / "config.json").read_text())["transformer_layer_config"]
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(native, folder / "model.safetensors")
    info = TargetInfo(
        hidden_size=32, vocab_size=96, num_layers=4, dtype=torch.float32,
        device=torch.device("cpu"), embedding=native["model.embed_tokens.weight"],
        lm_head=native["lm_head.weight"],
    )  # fmt: skip
    drafter = load_drafter(folder, info, {}, recycled=False)
    assert drafter.config.layout == request.param
    return drafter, info


@torch.no_grad()
def test_each_use_of_the_module_equals_speculators(oracle):
    """Use k reads the output of use k-1 at the same position, and the token k+1 further on."""
    drafter, info = oracle
    io, meta = load_file(ORACLE / "io.safetensors"), json.loads((ORACLE / "meta.json").read_text())
    ids, hidden = io["in.input_ids"][None], io["in.target_hidden"][None]
    (step,) = drafter.steps
    assert step.embed_tokens.weight is info.embedding
    for use in range(3):
        count = ids.shape[1] - use - 1
        place = torch.arange(count)[None]
        head_input, hidden = step(ids[:, use + 1 :].int(), place, hidden[:, :count])
        wanted = io[f"out.step{use}_hidden_postnorm"]
        close = {"atol": meta["atol"], "rtol": 0.0}
        torch.testing.assert_close(hidden[0, : len(wanted)], wanted, **close)
        logits = step.logits(head_input)[0, : len(wanted)]
        torch.testing.assert_close(logits, io[f"out.step{use}_logits"], **close)


# --- whole checkpoints ---


@pytest.fixture(scope="module", params=FAMILIES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    return publish(request.param, folder), folder


@torch.no_grad()
def test_the_text_model_is_the_target(published):
    """Renamed, and without the image tower and the head, which transformers leaves out."""
    whole, folder = published
    target = load_target(folder)
    assert target.max_seq_len == MAX_POSITIONS
    assert type(target.model).__name__.endswith("ForCausalLM")
    ids = torch.arange(3, 20)[None]
    # A copy: mapped weights lie where the file put them, and torch sums by alignment.
    model = copy.deepcopy(target.model)
    assert torch.equal(model(ids).logits, whole(input_ids=ids).logits)


def test_the_head_is_read_from_the_same_folder(published):
    whole, folder = published
    info = target_info(whole, MAX_POSITIONS)
    drafter = load_drafter(folder, info, {}, recycled=False)
    assert drafter.config.layout == "qwen3_next"
    assert drafter.config.num_draft_tokens == 1
    (step,) = drafter.steps
    assert step.lm_head.weight is info.lm_head
    wanted = mtp_tensors(whole, 1, fused=True)
    read = step.state_dict()
    for name in ("input_layernorm", "self_attn.q_proj", "self_attn.q_norm"):
        assert torch.equal(read[f"block.{name}.weight"], wanted[f"mtp.layers.0.{name}.weight"])
    for name, tensor in wanted.items():
        if ".experts." in name:
            assert torch.equal(read[name.replace("mtp.layers.0", "block")], tensor)
    assert torch.equal(read["enorm.weight"], wanted["mtp.pre_fc_norm_embedding.weight"])
    assert torch.equal(read["eh_proj.weight"], wanted["mtp.fc.weight"])


def test_experts_may_be_one_tensor_and_modules_share_what_is_kept_once(tmp_path):
    whole = publish("qwen3_5_moe", tmp_path, num_modules=2, fused=True)
    load_target(tmp_path)
    first, second = load_drafter(tmp_path, target_info(whole, 64), {}, recycled=False).steps
    wanted = mtp_tensors(whole, 2, fused=True)
    for index, step in enumerate((first, second)):
        name = f"mtp.layers.{index}.mlp.experts.gate_up_proj"
        assert torch.equal(step.block.mlp.experts.gate_up_proj, wanted[name])
    assert torch.equal(first.eh_proj.weight, second.eh_proj.weight)
    assert not torch.equal(first.block.mlp.gate.weight, second.block.mlp.gate.weight)


def test_what_is_wrong_with_a_head_is_named(tmp_path):
    folder = tmp_path / "whole"
    whole = publish("qwen3_5", folder)
    info, shard = target_info(whole, 64), folder / "model-3-of-3.safetensors"
    tensors, raw = load_file(shard), json.loads((folder / "config.json").read_text())

    def refused(words: str, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> None:
        """The head alone, changed, in a separate folder."""
        changed = dict(tensors)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors")
        text = {**raw, "text_config": {**raw["text_config"], **config}}
        (tmp_path / "config.json").write_text(json.dumps(text))
        with pytest.raises(CheckpointError, match=words):
            load_drafter(tmp_path, info, {}, recycled=False)

    refused(
        "missing: steps.0.block.mlp.up_proj", lambda t: t.pop("mtp.layers.0.mlp.up_proj.weight")
    )
    refused("missing: steps.0.hnorm", lambda t: t.pop("mtp.pre_fc_norm_hidden.weight"))
    refused("unexpected: steps.0.block.mlp.gate.weight", lambda t: t.update(
        {"mtp.layers.0.mlp.gate.weight": torch.ones(4, 48)}))  # fmt: skip
    refused("says 2 MTP modules", dict.copy, mtp_num_hidden_layers=2)
    refused(r"expected mtp\.embed_tokens\.weight", dict.copy, mtp_use_dedicated_embeddings=True)
    refused("holds no MTP modules", dict.clear)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-3-of-3\.safetensors is missing"):
        load_drafter(folder, info, {}, recycled=False)


def test_an_embedding_of_its_own_is_used(tmp_path):
    """And of a tied target, whose files have no head."""
    whole = publish("qwen3_5", tmp_path, is_tied=True)
    own, shard = torch.randn(VOCAB, 48), tmp_path / "model-3-of-3.safetensors"
    save_file({**load_file(shard), "mtp.embed_tokens.weight": own}, shard)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.embed_tokens.weight"] = shard.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (step,) = load_drafter(tmp_path, target_info(whole, 64), {}, recycled=False).steps
    assert torch.equal(step.embed_tokens.weight, own.double())
    assert torch.equal(step.lm_head.weight, whole.get_input_embeddings().weight)
    assert load_target(tmp_path).model.config.tie_word_embeddings


def test_fp8_blocks_of_stacked_experts_are_dequantised():
    weight = torch.randn(3, 20, 12).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 1) + 0.5
    tensors = {"experts.gate_up_proj": weight, "experts.gate_up_proj_scale_inv": scale}
    raw = {"text_config": {"quantization_config": {"weight_block_size": [16, 16]}}}
    (plain,) = dequantise(tensors, raw, torch.float32).values()
    for expert in range(3):
        rows = scale[expert].repeat_interleave(16, 0)[:20]
        assert torch.equal(plain[expert], weight[expert].float() * rows)


# --- end to end ---

MAX_SEQ_LEN = 52
SIZES = ((1, 12), (22, 15), (16, 9), (40, 12), (2, 6))
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 4, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip


@functools.cache
def expected(folder: Path) -> tuple[nn.Module, list[Ask], list[Ask]]:
    """The text model, its greedy tokens, and tokens that plain decoding draws."""
    model = load_target(folder).model
    asks = ask_all(model, SIZES)
    with compilespec.compile(folder, "none", **OPTIONS) as engine:
        outputs = engine.generate([list(ask.prompt) for ask in asks], sampled(asks))
    drawn = [
        Ask(prompt=ask.prompt, tokens=tuple(output.token_ids))
        for ask, output in zip(asks, outputs, strict=True)
    ]
    return model, asks, drawn


def sampled(asks: list[Ask]) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.6, seed=number, max_new_tokens=len(ask.tokens), ignore_eos=True
        )
        for number, ask in enumerate(asks)
    ]


def matrix() -> Iterator[Any]:
    for family, method, k in itertools.product(FAMILIES, ("mtp", "mtp_eagle"), (1, 3, 5)):
        chosen = (family, method, k) == ("qwen3_5", "mtp", 3)
        yield pytest.param(
            family,
            method,
            k,
            marks=() if chosen else pytest.mark.slow,
            id=f"{family}-{method}-K{k}",
        )


@pytest.mark.parametrize(("published", "method", "k"), list(matrix()), indirect=["published"])
def test_a_published_folder_is_target_and_drafter(published, method, k):
    """Joins, leaves, prompts in chunks, up to the maximum length; some drafts are accepted."""
    _, folder = published
    model, asks, drawn = expected(folder)
    info = target_info(model, MAX_SEQ_LEN)
    drafter = load_drafter(folder, info, {}, recycled=method == "mtp_eagle")
    with compilespec.compile(folder, method, num_draft_tokens=k, **OPTIONS) as engine:
        assert any("mtp qwen3_next x1" in why for why in engine.plan()["why"])
        poison(engine)
        for request, ask in zip(run_traffic(engine, asks, (1, 2, 4)), asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        assert 1.1 < engine.stats().acceptance_length < k + 0.9
        prompts = [list(ask.prompt) for ask in drawn]
        outputs = engine.generate(prompts, sampled(asks))
        assert [output.token_ids for output in outputs] == [list(ask.tokens) for ask in drawn]
        check_drafts(engine, asks[1], functools.partial(DRAFTS[method], model, drafter), k)
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0


DRAFTS = {"mtp": fresh_drafts, "mtp_eagle": recycled_drafts}


@torch.no_grad()
def check_drafts(
    engine: compilespec.Engine, ask: Ask, drafts: Callable[[list[int], int], list[int]], k: int
) -> None:
    """Every draft of a request is that of a recomputation from scratch."""
    params = SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True)
    request = engine.submit(list(ask.prompt), params)
    num_compared = 0
    while engine.has_work:
        engine.step()
        if request.row < 0 or not request.output_token_ids:
            continue
        tokens = [*ask.prompt, *request.output_token_ids]
        room = MAX_SEQ_LEN - len(tokens)
        state = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
        assert state[:room] == drafts(tokens, k)[:room]
        num_compared += 1
    assert num_compared > 2


def test_the_command_line_serves_the_folder(published, capsys):
    _, folder = published
    names = [*(bytes([byte]) for byte in range(32, 127)), "<|end|>", "<|pad|>"]
    byte_level_tokenizer(names, eos="<|end|>").save_pretrained(folder)
    printed = []
    options = ["--backend", "eager", "--max-new-tokens", "9", "--ignore-eos", "--json"]
    for spec in ("none", "mtp", "mtp_eagle"):
        asked = ["--model", str(folder), "--spec", spec, "--prompt", "a + b"]
        assert main(["generate", *asked, *options]) == 0
        printed.append(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"])
    assert len(printed[0]) == 9
    assert printed == [printed[0]] * 3
