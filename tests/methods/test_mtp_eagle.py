"""spec="mtp_eagle" on targets that hold their MTP modules, and transformers' own modules."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import compilespec
from compilespec import SamplingParams
from compilespec.methods.mtp.load import load_drafter
from compilespec.methods.mtp.random_modules import random_modules
from tests.support.models import (
    VOCAB,
    ask_all,
    assert_nothing_held,
    greedy_reference,
    run_traffic,
    target_info,
    tiny_target,
)
from tests.support.mtp import per_expert, recycled_drafts

MAX_SEQ_LEN = 37
SIZES = ((1, 11), (22, 15), (16, 9), (36, 1), (2, 6))
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **COMMON, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **COMMON, num_key_value_heads=2, head_dim=16, use_qk_norm=True, attention_bias=True,
        rope_parameters={
            "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5
        },
    ),
}  # fmt: skip


def enlarge(module: nn.Module) -> None:
    """Weights that make the tokens differ, and every norm and bias tell."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            noise = torch.randn_like(tensor)
            if tensor.dim() >= 2:
                tensor.copy_(noise * 1.4 / tensor.shape[-1] ** 0.5)
        for name, tensor in module.named_parameters():
            if tensor.dim() == 1:
                tensor.copy_(torch.randn_like(tensor) * 0.2 + ("norm" in name))


@functools.cache
def made(family: str, num_modules: int) -> tuple[nn.Module, MtpModel]:
    """A target in float64 and transformers' own modules for it."""
    torch.manual_seed(7)
    config = CONFIGS[family]()
    config.num_mtp_layers = num_modules
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="batched_mm"
    )
    enlarge(model)
    model.to(torch.float64).eval()
    modules = MtpModel(model, num_modules)
    enlarge(modules.layers)
    modules.to(torch.float64).eval()
    return model, modules


def publish(family: str, num_modules: int, folder: Path) -> Path:
    """Write a directory as published: the modules numbered after the target's layers."""
    model, modules = made(family, num_modules)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in modules.layers.state_dict().items():
        index, rest = name.split(".", 1)
        prefix = f"model.layers.{model.config.num_hidden_layers + int(index)}"
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors |= per_expert(f"{prefix}.{rest}", tensor)
    for index in range(num_modules):
        prefix = f"model.layers.{model.config.num_hidden_layers + index}"
        tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    family = request.param
    return family, publish(family, 3, tmp_path_factory.mktemp(family))


@torch.no_grad()
def test_modules_in_a_row_compute_what_transformers_does(published):
    """Rows, and the chain of drafts by three modules, none of them cached."""
    family, folder = published
    model, modules = made(family, 3)
    drafter = load_drafter(folder, target_info(model, MAX_SEQ_LEN), {}, recycled=False)
    tokens = torch.randint(3, VOCAB, (1, 19))
    hidden = model.model(tokens[:, :-1]).last_hidden_state
    place = torch.arange(18)[None]
    wanted, wanted_logits, _ = modules(
        input_ids=tokens[:, 1:], last_hidden_states=hidden, attention_mask=None,
        position_ids=place + 1, mtp_cache=MtpCache(config=modules.config),
    )  # fmt: skip
    ids, drafts, logits = tokens[:, 1:], [], []
    for step in drafter.steps:
        head_input, hidden = step(ids.int(), place.int(), hidden)
        logits.append(step.logits(head_input[:, -1]))
        drafts.append(step.propose(head_input[:, -1]))
        ids = torch.cat([ids[:, 1:], drafts[-1][None]], 1)
    assert torch.stack(drafts, 1).tolist() == wanted.tolist()
    torch.testing.assert_close(torch.stack(logits, 1), wanted_logits, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("published", "count"),
    [
        ("deepseek_v3", 3),
        ("glm4_moe", 1),
        ("glm4_moe", 5),
        *(pytest.param(family, count, marks=pytest.mark.slow)
          for family, count in (("deepseek_v3", 1), ("deepseek_v3", 5), ("glm4_moe", 3))),
    ],
    indirect=["published"],
)  # fmt: skip
def test_tokens_and_drafts_of_one_module_recycled(published, count):
    """Joins, leaves, rows used again; every draft is that of a recomputation from scratch."""
    family, folder = published
    model, _ = made(family, 3)
    asks = ask_all(model, SIZES)
    drafter = load_drafter(folder, target_info(model, MAX_SEQ_LEN), {}, recycled=True)
    with compilespec.compile(
        model, spec="mtp_eagle", draft=folder, num_draft_tokens=count, backend="eager",
        max_batch_size=5, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16, buckets=[1, 2, 5],
    ) as engine:  # fmt: skip
        for name, buffer in engine._executor.buffers.items():
            if name.startswith("cache."):
                buffer.fill_(float("nan"))
        for request, ask in zip(run_traffic(engine, asks, (1, 2, 3, 5)), asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0
        prompt = list(asks[1].prompt)
        request = engine.submit(prompt, SamplingParams(max_new_tokens=12, ignore_eos=True))
        num_compared = 0
        while engine.has_work:
            engine.step()
            if request.row < 0 or not request.output_token_ids:
                continue
            drafts = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
            tokens = [*prompt, *request.output_token_ids]
            assert drafts == recycled_drafts(model, drafter, tokens, count)
            num_compared += 1
        assert num_compared >= 2


def test_a_published_directory_is_target_and_drafter(published):
    """Found inside the target's checkpoint; K is the number of modules."""
    family, folder = published
    model, _ = made(family, 3)
    prompt = [5, 9, 60, 33, 4]
    with compilespec.compile(
        folder, spec="mtp_eagle", dtype=torch.float32, backend="eager", max_batch_size=2,
        max_seq_len=MAX_SEQ_LEN,
    ) as engine:  # fmt: skip
        assert engine.plan()["num_draft_tokens"] == 3
        assert any(f"block {family}" in why for why in engine.plan()["why"])
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert output.token_ids == greedy_reference(model, prompt, 12)


@pytest.mark.parametrize("options", [
    {}, {"hidden": "pre_norm", "own_head": True}, {"body": "mistral", "sliding_window": 7},
], ids=["llama", "pre_norm", "window"])  # fmt: skip
def test_random_modules_draft_for_any_target(options):
    model = tiny_target("llama", num_layers=2)
    drafter = random_modules(target_info(model, MAX_SEQ_LEN), 1, **options)
    asks = ask_all(model, SIZES[:4])
    with compilespec.compile(
        model, spec="mtp_eagle", draft=drafter, num_draft_tokens=2, backend="eager",
        max_batch_size=5, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16,
    ) as engine:  # fmt: skip
        for request, ask in zip(run_traffic(engine, asks, (1, 2, 4)), asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        assert "module 0 recycled" in str(engine.plan()["why"])
