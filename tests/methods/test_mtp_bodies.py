"""MTP modules of families that name or build them in their own way.

Each family's tensors are drawn by their published names; the reference is the publishers'
description, written out over them and computed over the whole sequence for every draft.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.mtp.load import load_drafter
from compilespec.runtime.engine import Engine
from compilespec.tracing.load import load_target
from tests.support.models import (
    VOCAB,
    ask_all,
    assert_nothing_held,
    poison,
    run_traffic,
    target_info,
    tiny_target,
)

D, HEAD, HEADS, KV_HEADS, INNER, EXPERTS, EXPERT = 48, 12, 4, 2, 80, 4, 20
MAX_SEQ_LEN, THETA, WINDOW, LAYERS = 48, 700.0, 6, 2
EPS = 1e-5
Shapes = dict[str, tuple[int, ...]]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    "max_position_embeddings": 128, "rms_norm_eps": EPS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}  # fmt: skip
NORMS: Shapes = {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
QK_NORMS: Shapes = {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
MLP: Shapes = {
    "mlp.gate_proj": (INNER, D), "mlp.up_proj": (INNER, D), "mlp.down_proj": (D, INNER),
}  # fmt: skip
DEEPSEEK: Shapes = {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "final_layernorm": (D,)}


def attention(prefix: str = "self_attn", kv_heads: int = KV_HEADS, value: int = HEAD) -> Shapes:
    return {
        f"{prefix}.q_proj": (HEADS * HEAD, D), f"{prefix}.k_proj": (kv_heads * HEAD, D),
        f"{prefix}.v_proj": (kv_heads * value, D), f"{prefix}.o_proj": (D, HEADS * value),
    }  # fmt: skip


def experts(prefix: str, kinds: tuple[str, ...] = ("gate", "up", "down")) -> Shapes:
    return {
        f"{prefix}.{kind}_proj": (D, EXPERT) if kind == "down" else (EXPERT, D) for kind in kinds
    }


class Family:
    """A checkpoint's modules, and what they compute; hidden states are those after the last
    norm.
    """

    config_class: ClassVar[str]
    fields: ClassVar[dict[str, Any]] = {}
    prefix = "model.layers.{}."
    first = LAYERS  # number of the first module
    modules = 2
    parts = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    shapes: ClassVar[Shapes] = {}
    reads_post_norm = True

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.weights: dict[str, Tensor] = {}
        for index in range(self.modules):
            for name, shape in self.shapes.items():
                noise = torch.randn(shape, generator=draw, dtype=torch.float64)
                is_vector = len(shape) == 1
                scaled = noise * 0.2 if is_vector else noise * 1.3 / math.sqrt(shape[-1])
                bare = name.endswith(("bias", "param"))
                self.weights[self.name(index, name if bare else f"{name}.weight")] = (
                    scaled + 1 if is_vector and not bare else scaled
                )

    def name(self, index: int, rest: str) -> str:
        return self.prefix.format(self.first + index) + rest

    def config(self) -> Any:
        return getattr(transformers, self.config_class)(**{**SIZES, **self.fields})

    def own(self) -> dict[str, Any]:
        """What config.json has beside."""
        return {"num_nextn_predict_layers": self.modules}

    @functools.cached_property
    def target(self) -> nn.Module:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            self.config(), attn_implementation="eager"
        )
        return model.double().eval()

    def write(self, folder: Path) -> Path:
        """A whole checkpoint, with the target's tensors."""
        self.target.save_pretrained(folder)
        file = folder / "model.safetensors"
        save_file({**load_file(file), **self.weights}, file, metadata={"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **self.own()}))
        return folder

    # --- the description ---

    def linear(self, x: Tensor, index: int, name: str) -> Tensor:
        return x @ self.weights[self.name(index, f"{name}.weight")].T

    def norm(self, x: Tensor, index: int, name: str, eps: float = EPS) -> Tensor:
        weight = self.weights[self.name(index, f"{name}.weight")]
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    def rope(self, x_TNR: Tensor, theta: float = THETA, *, is_paired: bool = False) -> Tensor:
        count = x_TNR.shape[-1] // 2
        rate = theta ** (-torch.arange(count).double() / count)
        angle = torch.arange(len(x_TNR)).double()[:, None, None] * rate
        shape = (count, 2) if is_paired else (2, count)
        a, b = x_TNR.unflatten(-1, shape).unbind(-1 if is_paired else -2)
        parts = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.stack(parts, -1).flatten(-2) if is_paired else torch.cat(parts, -1)

    def heads(self, x_TD: Tensor, index: int, name: str, width: int = HEAD) -> Tensor:
        return self.linear(x_TD, index, name).unflatten(-1, (-1, width))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Each token over those up to it, or the last `window`: [T, N * H]."""
        rows = []
        for row in range(len(query)):
            seen = slice(max(0, row - window + 1) if window else 0, row + 1)
            per_head = []
            for head in range(query.shape[1]):
                group = head * key.shape[1] // query.shape[1]
                scores = key[seen, group] @ query[row, head] / math.sqrt(query.shape[-1])
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                share = scores.softmax(0)[: row + 1 - (seen.start or 0)]
                per_head.append(share @ value[seen, group])
            rows.append(torch.stack(per_head))
        return torch.stack(rows)

    def mlp(self, x: Tensor, index: int, name: str = "mlp") -> Tensor:
        gate = functional.silu(self.linear(x, index, f"{name}.gate_proj"))
        up = self.linear(x, index, f"{name}.up_proj")
        return self.linear(gate * up, index, f"{name}.down_proj")

    def routed(
        self, x_TD: Tensor, wanted: Tensor, shares: Tensor, expert: Callable[[Tensor, int], Tensor],
        scale: float, group: int = EXPERTS,
    ) -> Tensor:  # fmt: skip
        """The two most wanted experts of each token, of its best group, by their shares."""
        rows = []
        for row, x_D in enumerate(x_TD):
            groups = wanted[row].split(group)
            best = max(range(len(groups)), key=lambda g: float(groups[g].topk(2).values.sum()))
            mine = range(best * group, (best + 1) * group)
            chosen = sorted(mine, key=lambda e: -float(wanted[row, e]))[:2]
            total = sum(shares[row, e] for e in chosen)
            rows.append(sum(shares[row, e] / total * scale * expert(x_D, e) for e in chosen))
        return torch.stack(rows)  # type: ignore[arg-type]

    def mix(self, x_TD: Tensor, index: int) -> Tensor:
        query, key, value = (self.heads(x_TD, index, f"self_attn.{k}_proj") for k in "qkv")
        found = self.attend(self.rope(query), self.rope(key), value).flatten(1)
        return self.linear(found, index, "self_attn.o_proj")

    def block(self, x: Tensor, index: int) -> Tensor:
        x = x + self.mix(self.norm(x, index, "input_layernorm"), index)
        return x + self.mlp(self.norm(x, index, "post_attention_layernorm"), index)

    def module(self, index: int, embed_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, and what the next module reads."""
        enorm, hnorm, projection, last = self.parts
        pair = [self.norm(embed_TD, index, enorm), self.norm(hidden_TD, index, hnorm)]
        x = self.block(self.linear(torch.cat(pair, -1), index, projection), index)
        x = self.norm(x, index, last)
        return x, x

    @torch.no_grad()
    def drafts(self, model: nn.Module, tokens: list[int], method: str, count: int) -> list[int]:
        """Drafts after `tokens`, by modules in turn, or the first one alone; nothing is cached."""
        embedding, head = (
            one.weight for one in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        ids, drafts = torch.tensor(tokens), []
        hidden, following = states(model, ids[:-1], self.reads_post_norm), ids[1:]
        for number in range(count):
            index = 0 if method == "mtp_eagle" else number % self.modules
            output, recycled = self.module(index, embedding[following], hidden)
            drafts.append(int((output[-1] @ head.T).argmax()))
            added = torch.tensor(drafts[-1:])
            if method == "mtp_eagle":
                following = torch.cat([following, added])
                hidden = torch.cat([hidden, recycled[-1:]])
            else:
                following, hidden = torch.cat([following[1:], added]), recycled
        return drafts


@torch.no_grad()
def states(model: nn.Module, ids_T: Tensor, post_norm: bool) -> Tensor:
    """The target's hidden states after, or before, its last norm."""
    kept: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _, args, out: kept.extend((args[0], out)))
    model(input_ids=ids_T[None], use_cache=False)
    hook.remove()
    return kept[post_norm][0]


class MiMoV2(Family):
    """A window with sinks, wider keys than values, a dense MLP."""

    config_class, prefix, first = "MiMoV2FlashConfig", "model.mtp.layers.{}.", 0
    value, scale, turned, theta = 8, 0.7, 6, 300.0
    fields: ClassVar[dict[str, Any]] = {
        "v_head_dim": 8, "attention_value_scale": 0.7, "sliding_window": WINDOW,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5
            },
        },
    }  # fmt: skip
    shapes: ClassVar[Shapes] = {
        **DEEPSEEK, **attention(kv_heads=2 * KV_HEADS, value=8), **MLP,
        "self_attn.attention_sink_bias": (HEADS,), "input_layernorm": (D,),
        "pre_mlp_layernorm": (D,),
    }  # fmt: skip

    def own(self) -> dict[str, Any]:
        return {}

    def mix(self, x_TD: Tensor, index: int) -> Tensor:
        query, key = (
            torch.cat([self.rope(x[..., : self.turned], self.theta), x[..., self.turned :]], -1)
            for x in (self.heads(x_TD, index, f"self_attn.{k}_proj") for k in "qk")
        )
        value = self.heads(x_TD, index, "self_attn.v_proj", self.value) * self.scale
        sinks = self.weights[self.name(index, "self_attn.attention_sink_bias")]
        found = self.attend(query, key, value, WINDOW, sinks).flatten(1)
        return self.linear(found, index, "self_attn.o_proj")

    def block(self, x: Tensor, index: int) -> Tensor:
        x = x + self.mix(self.norm(x, index, "input_layernorm"), index)
        return x + self.mlp(self.norm(x, index, "pre_mlp_layernorm"), index)


class Ernie(Family):
    """The target's last norm before the head; hidden states are those before it."""

    config_class, prefix, modules = "Ernie4_5_MoeConfig", "model.mtp_{}.{}.", 1
    reads_post_norm = False
    parts = ("emb_norm", "hidden_norm", "linear_proj", "")
    fields: ClassVar[dict[str, Any]] = {
        "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": EXPERT,
        "tie_word_embeddings": False,
    }  # fmt: skip
    shapes: ClassVar[Shapes] = {
        "emb_norm": (D,), "hidden_norm": (D,), "linear_proj": (D, 2 * D), **attention(), **MLP,
        **NORMS,
    }  # fmt: skip

    def name(self, index: int, rest: str) -> str:
        stem = rest.removesuffix(".weight")
        if stem in self.parts:
            return f"model.mtp_{stem}.{index}.weight"
        return f"model.mtp_block.{index}.{rest}"

    def mix(self, x_TD: Tensor, index: int) -> Tensor:
        query, key, value = (self.heads(x_TD, index, f"self_attn.{k}_proj") for k in "qkv")
        query, key = (self.rope(x, is_paired=True) for x in (query, key))
        return self.linear(self.attend(query, key, value).flatten(1), index, "self_attn.o_proj")

    def module(self, index: int, embed_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        pair = [self.norm(embed_TD, index, "emb_norm"), self.norm(hidden_TD, index, "hidden_norm")]
        x = self.block(self.linear(torch.cat(pair, -1), index, "linear_proj"), index)
        weight = self.last_norm
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight, x

    @property
    def last_norm(self) -> Tensor:
        return self.target.model.norm.weight


class HyV3(Family):
    """Norms of queries and keys, experts by a sigmoid; the module's own head is not read."""

    config_class = "HYV3Config"
    fields: ClassVar[dict[str, Any]] = {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT,
        "router_scaling_factor": 1.7,
    }  # fmt: skip
    shapes: ClassVar[Shapes] = {
        **DEEPSEEK, **attention(), **NORMS, **QK_NORMS,
        "mlp.router.gate": (EXPERTS, D), "mlp.expert_bias": (EXPERTS,), "shared_head": (VOCAB, D),
        **experts("mlp.shared_mlp"),
        **{name: shape for e in range(EXPERTS)
           for name, shape in experts(f"mlp.experts.{e}").items()},
    }  # fmt: skip

    def mix(self, x_TD: Tensor, index: int) -> Tensor:
        query, key, value = (self.heads(x_TD, index, f"self_attn.{k}_proj") for k in "qkv")
        query = self.rope(self.norm(query, index, "self_attn.q_norm"))
        key = self.rope(self.norm(key, index, "self_attn.k_norm"))
        return self.linear(self.attend(query, key, value).flatten(1), index, "self_attn.o_proj")

    def mlp(self, x: Tensor, index: int, name: str = "mlp") -> Tensor:
        if name != "mlp":
            return super().mlp(x, index, name)
        shares = self.linear(x, index, "mlp.router.gate").sigmoid()
        wanted = shares + self.weights[self.name(index, "mlp.expert_bias")]
        found = self.routed(
            x, wanted, shares, lambda y, e: self.mlp(y, index, f"mlp.experts.{e}"), 1.7
        )
        return found + self.mlp(x, index, "mlp.shared_mlp")


class Bailing(Family):
    """Latent attention whose heads are gated, experts in groups."""

    config_class = "BailingHybridConfig"
    nope, turned, value, latent = 8, 6, 10, 14
    fields: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": HEADS, "kv_lora_rank": 14, "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8, "v_head_dim": 10, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "layer_types": ["full_attention"] * LAYERS, "routed_scaling_factor": 1.3,
    }  # fmt: skip
    shapes: ClassVar[Shapes] = {
        **DEEPSEEK, **NORMS, "attention.q_proj": (HEADS * 14, D), "attention.g_proj": (HEADS, D),
        "attention.kv_a_proj_with_mqa": (20, D), "attention.kv_a_layernorm": (14,),
        "attention.kv_b_proj": (HEADS * 18, 14), "attention.dense": (D, HEADS * 10),
        "mlp.gate": (EXPERTS, D), "mlp.gate.expert_bias": (EXPERTS,),
        **experts("mlp.shared_experts"),
        **{name: shape for e in range(EXPERTS)
           for name, shape in experts(f"mlp.experts.{e}").items()},
    }  # fmt: skip

    def mix(self, x_TD: Tensor, index: int) -> Tensor:
        query = self.heads(x_TD, index, "attention.q_proj", self.nope + self.turned)
        both = self.linear(x_TD, index, "attention.kv_a_proj_with_mqa")
        latent = self.norm(both[:, : self.latent], index, "attention.kv_a_layernorm", 1e-6)
        pairs = self.heads(latent, index, "attention.kv_b_proj", self.nope + self.value)
        turned = self.rope(both[:, None, self.latent :], is_paired=True).expand(-1, HEADS, -1)
        key = torch.cat([pairs[..., : self.nope], turned], -1)
        last = self.rope(query[..., self.nope :], is_paired=True)
        query = torch.cat([query[..., : self.nope], last], -1)
        found = self.attend(query, key, pairs[..., self.nope :])
        gate = self.linear(x_TD, index, "attention.g_proj").sigmoid()
        return self.linear((found * gate[..., None]).flatten(1), index, "attention.dense")

    def mlp(self, x: Tensor, index: int, name: str = "mlp") -> Tensor:
        if name != "mlp":
            return super().mlp(x, index, name)
        shares = self.linear(x, index, "mlp.gate").sigmoid()
        wanted = shares + self.weights[self.name(index, "mlp.gate.expert_bias")]
        found = self.routed(
            x, wanted, shares, lambda y, e: self.mlp(y, index, f"mlp.experts.{e}"), 1.3, 2
        )
        return found + self.mlp(x, index, "mlp.shared_experts")


class Mellum(Family):
    """Qwen3-Next's names; a window, and experts by a softmax."""

    config_class, prefix, modules, first = "MellumConfig", "mtp.layers.{}.", 1, 0
    parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    fields: ClassVar[dict[str, Any]] = {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT,
        "sliding_window": WINDOW, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": THETA},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }  # fmt: skip
    shapes: ClassVar[Shapes] = {
        "pre_fc_norm_embedding": (D,), "pre_fc_norm_hidden": (D,), "fc": (D, 2 * D), "norm": (D,),
        **attention(), **NORMS, **QK_NORMS, "mlp.gate": (EXPERTS, D),
        **{name: shape for e in range(EXPERTS)
           for name, shape in experts(f"mlp.experts.{e}").items()},
    }  # fmt: skip

    def own(self) -> dict[str, Any]:
        return {"num_mtp_layers": 1}

    def name(self, index: int, rest: str) -> str:
        is_own = rest.rpartition(".")[0] in self.parts
        return f"mtp.{rest}" if is_own else super().name(index, rest)

    def mix(self, x_TD: Tensor, index: int) -> Tensor:
        query, key, value = (self.heads(x_TD, index, f"self_attn.{k}_proj") for k in "qkv")
        query = self.rope(self.norm(query, index, "self_attn.q_norm"), 300.0)
        key = self.rope(self.norm(key, index, "self_attn.k_norm"), 300.0)
        found = self.attend(query, key, value, WINDOW).flatten(1)
        return self.linear(found, index, "self_attn.o_proj")

    def mlp(self, x: Tensor, index: int, name: str = "mlp") -> Tensor:
        if name != "mlp":
            return super().mlp(x, index, name)
        shares = self.linear(x, index, "mlp.gate").softmax(-1)
        return self.routed(
            x, shares, shares, lambda y, e: self.mlp(y, index, f"mlp.experts.{e}"), 1.0
        )


class NemotronH(Family):
    """Two layers a module: attention that knows no positions, then experts without gates."""

    config_class, prefix, modules = "NemotronHConfig", "mtp.layers.{}.", 2
    fields: ClassVar[dict[str, Any]] = {
        "layers_block_type": ["full_attention", "mlp"], "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT, "layer_norm_epsilon": EPS,
        "moe_shared_expert_intermediate_size": EXPERT, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 1.4, "mlp_hidden_act": "relu2",
    }  # fmt: skip
    shapes: ClassVar[Shapes] = {
        "0.enorm": (D,), "0.hnorm": (D,), "0.eh_proj": (D, 2 * D), "0.norm": (D,), "1.norm": (D,),
        "1.final_layernorm": (D,), **attention("0.mixer"), "1.mixer.gate": (EXPERTS, D),
        "1.mixer.gate.e_score_correction_bias": (EXPERTS,),
        **experts("1.mixer.shared_experts", ("up", "down")),
        **{name: shape for e in range(EXPERTS)
           for name, shape in experts(f"1.mixer.experts.{e}", ("up", "down")).items()},
    }  # fmt: skip
    parts = ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm")

    def name(self, index: int, rest: str) -> str:
        layer, _, rest = rest.partition(".")
        return f"mtp.layers.{2 * index + int(layer)}.{rest}"

    def own(self) -> dict[str, Any]:
        return {"num_nextn_predict_layers": self.modules, "mtp_hybrid_override_pattern": "*E"}

    def mlp(self, x: Tensor, index: int, name: str = "mlp") -> Tensor:
        inner = self.linear(x, index, f"{name}.up_proj").relu().square()
        return self.linear(inner, index, f"{name}.down_proj")

    def block(self, x: Tensor, index: int) -> Tensor:
        y = self.norm(x, index, "0.norm")
        query, key, value = (self.heads(y, index, f"0.mixer.{k}_proj") for k in "qkv")
        found = self.attend(query, key, value).flatten(1)
        x = x + self.linear(found, index, "0.mixer.o_proj")
        y = self.norm(x, index, "1.norm")
        shares = self.linear(y, index, "1.mixer.gate").sigmoid()
        wanted = shares + self.weights[self.name(index, "1.mixer.gate.e_score_correction_bias")]
        found = self.routed(
            y, wanted, shares, lambda z, e: self.mlp(z, index, f"1.mixer.experts.{e}"), 1.4, 2
        )
        return x + found + self.mlp(y, index, "1.mixer.shared_experts")


FAMILIES: dict[str, type[Family]] = {
    "nemotron_h": NemotronH, "mimo_v2_flash": MiMoV2, "ernie4_5_moe": Ernie,
    "bailing_hybrid": Bailing, "hy_v3": HyV3, "mellum": Mellum,
}  # fmt: skip


@functools.cache
def made(name: str) -> Family:
    return FAMILIES[name]()


@pytest.fixture(scope="module", params=FAMILIES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return request.param, made(request.param).write(tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def test_each_module_computes_what_is_described(published):
    """From a whole checkpoint, whose other tensors are the target's."""
    name, folder = published
    family = made(name)
    ids = torch.randint(3, VOCAB, (1, 15))
    target = load_target(folder)
    assert torch.isfinite(target.model(input_ids=ids, use_cache=False).logits).all()
    info = target_info(family.target, MAX_SEQ_LEN)
    drafter = load_drafter(folder, info, {}, recycled=False)
    assert (drafter.config.body, drafter.config.num_modules) == (name, family.modules)
    hidden, place = torch.randn(1, 15, D, dtype=torch.float64), torch.arange(15)[None]
    for index, step in enumerate(drafter.steps):
        got = step(ids.int(), place.int(), hidden)
        wanted = family.module(index, info.embedding[ids[0]], hidden[0])
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one[0], other, atol=3e-5, rtol=0.0)


OPTIONS: dict[str, Any] = {
    "backend": "eager", "max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "max_prefill_tokens": 16,
}  # fmt: skip
REQUESTS = ((1, 9), (22, 10), (17, 8), (38, 10), (3, 6))


def cases() -> Iterator[Any]:
    usual = (("nemotron_h", "mtp", 3), ("mimo_v2_flash", "mtp", 2), ("mellum", "mtp_eagle", 1))
    for name in FAMILIES:
        for method in ("mtp", "mtp_eagle"):
            for k in (1, 2, 3):
                marks = () if (name, method, k) in usual else pytest.mark.slow
                yield pytest.param(name, method, k, marks=marks)


@functools.cache
def llama() -> tuple[nn.Module, Any]:
    """A target that modules of every family fit."""
    model = tiny_target("llama", num_layers=1)
    return model, ask_all(model, REQUESTS)


@pytest.mark.parametrize(("published", "method", "k"), list(cases()), indirect=["published"])
def test_every_draft_is_the_described_one(published, method, k):
    """Joins, leaves, prompts in chunks; the target is another one of the same width."""
    name, folder = published
    model, asks = llama()
    with compilespec.compile(model, method, draft=folder, num_draft_tokens=k, **OPTIONS) as engine:
        assert any(f"block {name}" in why for why in engine.plan()["why"])
        poison(engine)
        for request, ask in zip(run_traffic(engine, asks, (1, 3, 2)), asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        check_drafts(engine, made(name), model, asks[1], method, k)
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0


def check_drafts(
    engine: Engine, family: Family, model: nn.Module, ask: Any, method: str, k: int
) -> None:
    params = SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True)
    request, compared = engine.submit(list(ask.prompt), params), 0
    while engine.has_work:
        engine.step()
        if request.row < 0 or not request.output_token_ids:
            continue
        tokens = [*ask.prompt, *request.output_token_ids]
        drafts = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
        assert drafts == family.drafts(model, tokens, method, k), f"after {len(tokens)} tokens"
        compared += 1
    assert compared > 4


def test_what_is_missing_or_not_built_is_named(tmp_path):
    def refused(name: str, error: type[Exception], words: str, lost: str, **config: Any) -> None:
        family = made(name)
        raw = {**family.config().to_dict(), **family.own(), **config}
        norm = {"model.norm.weight": torch.ones(D)}
        kept = {k: v for k, v in {**norm, **family.weights}.items() if lost not in k}
        (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(error, match=words):
            load_drafter(tmp_path, target_info(family.target, 64), {}, recycled=False)

    refused("ernie4_5_moe", CheckpointError, r"missing: steps\.0\.norm\.weight", "model.norm")
    refused("nemotron_h", CheckpointError, r"missing: steps\.1\.block\.layers\.0\.mixer\.q_proj",
            "layers.2.mixer.q_proj")  # fmt: skip
    refused("nemotron_h", CheckpointError, r"missing: .*experts\.2\.up_proj",
            "layers.1.mixer.experts.2.up_proj")  # fmt: skip
    refused("nemotron_h", NotSupported, "recurrent layers could not be rewound", "nothing",
            mtp_hybrid_override_pattern="ME")  # fmt: skip
    refused("mellum", NotSupported, "'qwen4_exp_text' are not built, because they read the",
            "nothing", model_type="qwen4_exp_text")  # fmt: skip
