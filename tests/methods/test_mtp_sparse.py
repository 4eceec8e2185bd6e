"""MTP modules whose block chooses its keys by an indexer: DeepSeek-V3.2, GLM-5 and HY-V4.

The reference is the publishers' description, written out over the raw tensors of the checkpoint
and computed over the whole sequence for every draft; the engine keeps the keys of the module's
indexer in its cache.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, NotSupported
from compilespec.inspect.verify import verify
from compilespec.methods.mtp.load import load_drafter
from compilespec.methods.mtp.random_modules import random_modules
from compilespec.passes.splice.draft_loops import calls
from compilespec.passes.splice.insert_cached_keys import cache_keys
from compilespec.runtime.engine import Engine
from compilespec.tracing.attention import MASKED, registered_as
from tests.support.models import (
    VOCAB,
    Ask,
    ask_all,
    assert_nothing_held,
    poison,
    run_traffic,
    target_info,
    tiny_target,
)
from tests.support.mtp import per_expert
from tests.support.windowed import fresh_drafts

MAX_SEQ_LEN, TOP_K, WIDTH, NUM_MODULES = 64, 6, 48, 3
NOPE, ROPE, VALUE, LATENT, INDEX_HEADS, INDEX_DIM = 10, 8, 12, 16, 16, 16
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "q_lora_rank": 24, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "index_topk": TOP_K,
    "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_nextn_predict_layers": NUM_MODULES,
    "first_k_dense_replace": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
}  # fmt: skip
CONFIGS = {
    "deepseek_v32": lambda: transformers.DeepseekV32Config(**COMMON, n_group=2, topk_group=1),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(**COMMON, n_group=1, topk_group=1),
    "hy_v4": lambda: transformers.HYV4Config(**COMMON, swiglu_limit=0.6),
}
FOLDED = ("model.layers.{}.", {"norm.weight": "shared_head.norm.weight"})
PUBLISHED = {  # where the modules are, and names that transformers has not
    "deepseek_v32": FOLDED,
    "glm_moe_dsa": FOLDED,
    "hy_v4": (
        "model.mtp_layers.{}.",
        {
            "norm.weight": "final_layernorm.weight",
            "self_attn.sinks": "self_attn.learnable_sink_param",
            "self_attn.gate_proj.weight": "self_attn.linear_gate.weight",
        },
    ),
}
# The last token weighs more than those before it, so that a module can guess; in a module more of
# what attention finds is kept, so that a wrong choice of keys shows.
SMALL = {"down_proj": 0.12, "down_proj.weight": 0.12}
INTO_STREAM = {"o_proj.weight": 0.12, **SMALL}
INTO_MODULES = {"o_proj.weight": 0.5, **SMALL}


@functools.cache
def made(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A target in float64, and the tensors of its modules by their published names."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[family](), attn_implementation="eager", experts_implementation="batched_mm"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_matrix = parameter.dim() > 1
            parameter.copy_(
                noise * 1.4 / parameter.shape[-1] ** 0.5 if is_matrix else 1 + noise * 0.2
            )
            parameter.mul_(share_of(name, INTO_STREAM))
        model.get_input_embeddings().weight.mul_(4)
    model = model.double().eval()
    drafter = random_modules(
        target_info(model, MAX_SEQ_LEN), NUM_MODULES, body=family, **model.config.to_dict()
    )
    tensors: dict[str, Tensor] = {}
    for index, step in enumerate(drafter.steps):
        for name, tensor in step.state_dict().items():
            if name.startswith(("embed_tokens", "lm_head")):
                continue
            tensor = tensor * share_of(name, INTO_MODULES)
            name = name.removeprefix("block.")
            name = place(family, index) + PUBLISHED[family][1].get(name, name)
            tensors |= per_expert(name, tensor)
        name = f"{place(family, index)}eh_proj.weight"
        first = torch.eye(WIDTH, dtype=torch.float64)
        tensors[name] = torch.cat([first, tensors[name][:, WIDTH:] * 0.1], 1)
    return model, tensors


def place(family: str, index: int) -> str:
    where = PUBLISHED[family][0]
    return where.format(index + (where == FOLDED[0]))  # behind the target's one layer


def share_of(name: str, shares: Mapping[str, float]) -> float:
    return next((share for end, share in shares.items() if name.endswith(end)), 1.0)


@pytest.fixture(scope="module", params=CONFIGS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A folder as published: the modules numbered after the target's layers."""
    folder = tmp_path_factory.mktemp(request.param)
    model, tensors = made(request.param)
    model.save_pretrained(folder)
    save_file(
        {**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    return request.param, folder


# --- the description ---


class Module:
    """Module `index` of a checkpoint, by its equations."""

    def __init__(self, family: str, index: int) -> None:
        self.model, tensors = made(family)
        prefix = place(family, index)
        self.weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        self.config, self.is_hy = self.model.config, family == "hy_v4"
        self.is_paired = family == "glm_moe_dsa"
        self.last = "final_layernorm" if self.is_hy else "shared_head.norm"

    def __call__(self, ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        (ids_T,), (hidden_TD,) = ids, hidden
        embed_TD = self.model.get_input_embeddings().weight[ids_T]
        x = self.linear(
            torch.cat([self.norm(embed_TD, "enorm"), self.norm(hidden_TD, "hnorm")], -1), "eh_proj"
        )
        x = x + self.attention(self.norm(x, "input_layernorm"), positions.flatten())
        x = x + self.experts(self.norm(x, "post_attention_layernorm"))
        x = self.norm(x, self.last)[None]
        return x, x

    def propose(self, head_input: Tensor) -> Tensor:
        return (head_input @ self.model.get_output_embeddings().weight.T).argmax(-1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        eps = self.config.rms_norm_eps if eps is None else eps
        return x * (mean + eps).rsqrt() * self.weights[f"{name}.weight"]

    def rope(self, x_TNR: Tensor, positions_T: Tensor, *, is_paired: bool) -> Tensor:
        """Turn pairs of neighbours, or the two halves."""
        count = x_TNR.shape[-1] // 2
        rate = 700.0 ** (-torch.arange(count).double() / count)
        angle = positions_T.double()[:, None, None] * rate
        shape = (count, 2) if is_paired else (2, count)
        a, b = x_TNR.unflatten(-1, shape).unbind(-1 if is_paired else -2)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attention(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Latent attention of each token over the best keys of those up to it."""
        low = self.norm(self.linear(x_TD, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
        query = self.linear(low, "self_attn.q_b_proj").unflatten(-1, (4, NOPE + ROPE))
        both = self.linear(x_TD, "self_attn.kv_a_proj_with_mqa")
        latent = self.norm(both[:, :LATENT], "self_attn.kv_a_layernorm", 1e-6)
        pairs = self.linear(latent, "self_attn.kv_b_proj").unflatten(-1, (4, NOPE + VALUE))
        turned = self.rope(query[..., NOPE:], positions_T, is_paired=not self.is_hy)
        turned_key = self.rope(both[:, None, LATENT:], positions_T, is_paired=not self.is_hy)
        seen = self.choose(x_TD, low, positions_T)
        rows = []
        for row, keys in enumerate(seen):
            scores = torch.einsum("nh,tnh->nt", query[row, :, :NOPE], pairs[keys, :, :NOPE])
            scores = scores + torch.einsum("nh,th->nt", turned[row], turned_key[keys, 0])
            scores = scores / (NOPE + ROPE) ** 0.5
            if self.is_hy:  # and a number for no key at all
                sink = self.weights["self_attn.learnable_sink_param"]
                scores = torch.cat([scores, sink[:, None]], -1)
            share = scores.softmax(-1)[:, : len(keys)]
            rows.append(torch.einsum("nt,tnh->nh", share, pairs[keys, :, NOPE:]).flatten())
        found = torch.stack(rows)
        if self.is_hy:
            found = found * self.linear(x_TD, "self_attn.linear_gate").sigmoid()
        return self.linear(found, "self_attn.o_proj")

    def choose(self, x_TD: Tensor, low: Tensor, positions_T: Tensor) -> Iterator[list[int]]:
        """The keys that each token sees: the `TOP_K` best of the lightning indexer."""
        name = "self_attn.indexer."
        query = self.linear(low, f"{name}wq_b").unflatten(-1, (INDEX_HEADS, INDEX_DIM))
        plain = self.linear(x_TD, f"{name}wk")
        plain = plain - plain.mean(-1, keepdim=True)
        plain = plain * (plain.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        key = plain * self.weights[f"{name}k_norm.weight"] + self.weights[f"{name}k_norm.bias"]
        query, key = (self.index_rope(x, positions_T) for x in (query, key[:, None]))
        share = self.linear(x_TD, f"{name}weights_proj")
        for row in range(len(x_TD)):
            scores = (key[: row + 1, 0] @ query[row].T).relu() @ share[row]
            yield sorted(scores.argsort(descending=True)[:TOP_K].tolist())

    def index_rope(self, x: Tensor, positions_T: Tensor) -> Tensor:
        """Turn the first numbers, or the last ones."""
        if self.is_hy:
            first, last = x[..., :-ROPE], x[..., -ROPE:]
            return torch.cat([first, self.rope(last, positions_T, is_paired=False)], -1)
        turned = self.rope(x[..., :ROPE], positions_T, is_paired=self.is_paired)
        return torch.cat([turned, x[..., ROPE:]], -1)

    def experts(self, x_TD: Tensor) -> Tensor:
        output = self.mlp(x_TD, "mlp.shared_experts")
        scores = self.linear(x_TD, "mlp.gate").sigmoid()
        wanted = scores + self.weights["mlp.gate.e_score_correction_bias"]
        groups = wanted.unflatten(-1, (self.config.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).argmax(-1)
        for row, x_D in enumerate(x_TD):
            size = groups.shape[-1]
            mine = range(int(best[row]) * size, (int(best[row]) + 1) * size)
            chosen = sorted(mine, key=lambda expert: -float(wanted[row, expert]))[:2]
            total = sum(float(scores[row, expert]) for expert in chosen)
            for expert in chosen:
                share = float(scores[row, expert]) / total * self.config.routed_scaling_factor
                most = self.config.swiglu_limit if self.is_hy else None
                output[row] += share * self.mlp(x_D, f"mlp.experts.{expert}", most)
        return output

    def mlp(self, x: Tensor, name: str, most: float | None = None) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        if most is not None:
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return self.linear(functional.silu(gate) * up, f"{name}.down_proj")


class Described:
    """The modules of a family, as the functions that draft from scratch take them."""

    chain = "module_rows"

    def __init__(self, family: str) -> None:
        self.steps = [Module(family, index) for index in range(NUM_MODULES)]


@torch.no_grad()
def recycled_by(described: Described, tokens: list[int], count: int) -> list[int]:
    """Drafts of the first module, each row of which is of the position before its token's."""
    (step, *_), ids = described.steps, torch.tensor([tokens])
    hidden, ids, drafts = step.model.model(ids[:, :-1]).last_hidden_state, ids[:, 1:], []
    for _ in range(count):
        output, _ = step(ids, torch.arange(ids.shape[1]), hidden)
        drafts.append(int(step.propose(output[:, -1])))
        ids = torch.cat([ids, torch.tensor([drafts[-1:]])], 1)
        hidden = torch.cat([hidden, output[:, -1:]], 1)
    return drafts


@torch.no_grad()
def drafts_by_description(family: str, method: str, tokens: list[int], count: int) -> list[int]:
    described = Described(family)
    if method == "mtp_eagle":
        return recycled_by(described, tokens, count)
    return fresh_drafts(made(family)[0], described, tokens, count)  # type: ignore[arg-type]


@pytest.fixture
def marked() -> Iterator[None]:
    """Attention by the marker, which knows sinks; transformers' sdpa does not."""
    with registered_as(MASKED):
        yield


@torch.no_grad()
@pytest.mark.usefixtures("marked")
def test_each_module_computes_what_is_described(published):
    """Rows past the indexer's choice, none of them cached; a choice of all keys differs."""
    family, folder = published
    model, _ = made(family)
    drafter = load_drafter(folder, target_info(model, MAX_SEQ_LEN), {}, recycled=False)
    assert drafter.config.body == family
    assert drafter.config.num_modules == NUM_MODULES
    ids, place = torch.randint(3, VOCAB, (1, 21)), torch.arange(20)[None]
    hidden = model.model(ids[:, :-1]).last_hidden_state
    for index, step in enumerate(drafter.steps):
        got, _ = step(ids[:, 1:].int(), place.int(), hidden)
        wanted, _ = Module(family, index)(ids[:, 1:], place, hidden)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0.0)
        step.block.self_attn.indexer.index_topk = 20
        dense, _ = step(ids[:, 1:].int(), place.int(), hidden)
        assert float((dense - wanted)[0, TOP_K:].abs().max()) > 0.05
        torch.testing.assert_close(dense[:, :TOP_K], wanted[:, :TOP_K], atol=2e-5, rtol=0.0)


# --- the engine ---

SIZES = ((9, 26), (29, 20), (21, 12), (1, 8), (1, 9), (40, 9))
OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
    "kv_cache_tokens": 80,
}  # fmt: skip


@functools.cache
def asked(family: str) -> list[Ask]:
    return ask_all(made(family)[0], SIZES)


@pytest.mark.parametrize(
    ("published", "method", "k"),
    [
        ("glm_moe_dsa", "mtp_eagle", 3),
        ("deepseek_v32", "mtp", 2),
        ("hy_v4", "mtp_eagle", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("glm_moe_dsa", "mtp", 3), ("glm_moe_dsa", "mtp_eagle", 1),
                ("deepseek_v32", "mtp", 1), ("deepseek_v32", "mtp_eagle", 2),
                ("deepseek_v32", "mtp", 3), ("hy_v4", "mtp", 2), ("hy_v4", "mtp_eagle", 3),
            )
        ),
    ],
    indirect=["published"],
)  # fmt: skip
def test_every_draft_is_the_described_one(published, method, k):
    """Prompts shorter and longer than the choice, in chunks; joins, a preemption, a prefix hit."""
    family, folder = published
    asks = asked(family)
    with compilespec.compile(
        folder, method, dtype=torch.float64, num_draft_tokens=k, **OPTIONS
    ) as engine:
        assert any(f"block {family}" in why for why in engine.plan()["why"])
        poison(engine)
        compared, _ = follow(engine, family, method, k, asks)
        assert compared > 20
        assert engine.stats().num_preemptions > 0
        follow(engine, family, method, k, asks[1:2])
        before = engine.stats().num_cached_tokens
        compared, _ = follow(engine, family, method, k, asks[1:2])
        assert compared > 3
        assert engine.stats().num_cached_tokens == before + 16  # a block
        assert 1.1 < engine.stats().acceptance_length < k + 0.9
        assert engine.stats().num_recompiles == 0


def test_a_draft_model_with_an_indexer_drafts_what_it_would_say():
    """The target as its own draft model: every draft is right while its indexer's keys are."""
    model, asks = made("deepseek_v32")[0], asked("deepseek_v32")
    with compilespec.compile(
        model, "draft_model", draft=model, num_draft_tokens=2, **OPTIONS
    ) as engine:
        poison(engine)
        for request, ask in zip(run_traffic(engine, asks, (1, 3, 2)), asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
            assert set(request.emitted_per_step[:-1]) <= {3}
        assert_nothing_held(engine)
        assert engine.stats().num_preemptions > 0


def stale(step: Any, found: list[Any], owner: str, places: Any) -> int:
    """Steps of decoding do not write the indexer's keys."""
    with step.before(found[0]):
        kept = torch.full_like(places.slot, -1) if step.is_decode else places.slot
    return cache_keys(step, found, owner, places._replace(slot=kept))


def other_row(step: Any, found: list[Any], owner: str, places: Any) -> int:
    """The keys of another request decide."""
    with step.before(found[0]):
        other = torch.where(places.row > 0, places.row - 1, places.row)
    return cache_keys(step, found, owner, places._replace(row=other))


@pytest.mark.parametrize("published", ["deepseek_v32"], indirect=True)
@pytest.mark.parametrize("fault", [stale, pytest.param(other_row, marks=pytest.mark.slow)])
def test_a_fault_of_the_indexers_keys_shows(monkeypatch, published, fault):
    """In the drafts; tokens stay right."""
    family, folder = published
    monkeypatch.setattr(calls, "cache_keys", fault)
    with compilespec.compile(
        made(family)[0], "mtp_eagle", draft=folder, num_draft_tokens=2, **OPTIONS
    ) as engine:
        _, wrong = follow(engine, family, "mtp_eagle", 2, asked(family)[:3], strict=False)
    assert wrong > 3


@pytest.mark.parametrize("published", ["glm_moe_dsa"], indirect=True)
@pytest.mark.parametrize("method", ["mtp", "mtp_eagle"])
def test_the_steps_are_those_of_the_references(published, method):
    """And catching up after steps without drafts."""
    family, folder = published
    counts = (0, 2) if method == "mtp_eagle" else 2
    program = compilespec.trace(
        made(family)[0], method, draft=folder, num_draft_tokens=counts, max_batch_size=2,
        max_seq_len=40, max_prefill_tokens=16, keep_graphs=True,
    )  # fmt: skip
    report = verify(program, passes=["splice_draft_loop"], batch_sizes=[2])
    assert not report.failed
    assert any(check.pass_name == "splice_draft_loop" for check in report.checks)


@pytest.mark.parametrize("published", ["glm_moe_dsa"], indirect=True)
def test_what_does_not_go_with_an_indexer_is_refused(published, tmp_path):
    family, folder = published
    model, tensors = made(family)
    draft = load_drafter(folder, target_info(model, MAX_SEQ_LEN), {}, recycled=False)

    def refused(words: str, target: nn.Module, spec: str, **options: Any) -> None:
        with pytest.raises(NotSupported, match=words):
            compilespec.trace(target, spec, max_seq_len=MAX_SEQ_LEN, draft=draft, **options)

    sizes = {"kv_block_sizes": (8,), "num_draft_tokens": 1}
    refused("with kv_block_sizes= yet", model, "mtp_multi", **sizes)
    refused("a drafter that chooses keys by an indexer", tiny_target("llama"), "mtp_eagle")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    for lost in ("self_attn.indexer.wk", "mlp.experts.2.up_proj"):
        name = f"model.layers.1.{lost}.weight"
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"missing: .*{lost}"):
            load_drafter(tmp_path, target_info(model, MAX_SEQ_LEN), {}, recycled=False)


def follow(
    engine: Engine, family: str, method: str, k: int, asks: list[Ask], *, strict: bool = True
) -> tuple[int, int]:
    """Run traffic whose tokens are right; the number of drafts compared, and of wrong ones."""
    requests, queue, compared, wrong = [], list(asks), 0, 0
    while queue or engine.has_work:
        while queue and sum(not request.finished for request in requests) < 3:
            ask = queue.pop(0)
            params = SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True)
            requests.append(engine.submit(list(ask.prompt), params))
        engine.step()
        for request, ask in zip(requests, asks, strict=False):
            if request.row < 0 or not request.output_token_ids:
                continue
            tokens = [*ask.prompt, *request.output_token_ids]
            room = MAX_SEQ_LEN - len(tokens)
            drafts = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
            wanted = drafts_by_description(family, method, tokens, k)
            if strict:
                assert drafts[:room] == wanted[:room], f"after {len(tokens)} tokens"
            compared += 1
            wrong += drafts[:room] != wanted[:room]
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens)
    assert_nothing_held(engine)
    return compared, wrong
