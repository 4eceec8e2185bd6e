"""MTP modules of every published layout, against formulas written out over the raw tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from compilespec.errors import (
    CheckpointError,
    DraftMismatch,
    InvalidOption,
    NotSupported,
)
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.mtp.load import load_drafter
from compilespec.methods.registry import get_method
from compilespec.tracing.target_info import TargetInfo

D, V, ROWS, NUM_LAYERS = 24, 31, 9, 4
HEAD, HEADS, KV_HEADS, INNER = 8, 4, 2, 40
CLOSE = {"atol": 2e-5, "rtol": 0.0}  # transformers' norms compute in float32
SIZES: dict[str, Any] = {
    "hidden_size": D, "vocab_size": V, "num_hidden_layers": NUM_LAYERS, "head_dim": HEAD,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER,
    "rms_norm_eps": 1e-5, "rope_theta": 700.0, "max_position_embeddings": 64,
}  # fmt: skip
ATTENTION = {
    "self_attn.q_proj": (HEADS * HEAD, D), "self_attn.k_proj": (KV_HEADS * HEAD, D),
    "self_attn.v_proj": (KV_HEADS * HEAD, D), "self_attn.o_proj": (D, HEADS * HEAD),
}  # fmt: skip
MLP = {"mlp.gate_proj": (INNER, D), "mlp.up_proj": (INNER, D), "mlp.down_proj": (D, INNER)}
NORMS = {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
QK_NORMS = {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
DENSE = {**ATTENTION, **MLP, **NORMS}
DEEPSEEK = {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}
MIMO = {
    "token_layernorm": (D,), "hidden_layernorm": (D,), "input_proj": (D, 2 * D),
    "final_layernorm": (D,),
}  # fmt: skip
NUM_EXPERTS = 5
QWEN_MOE = {
    "mlp.gate": (NUM_EXPERTS, D), "mlp.shared_expert_gate": (1, D),
    **{f"mlp.shared_expert.{kind}_proj": shape
       for kind, shape in (("gate", (12, D)), ("up", (12, D)), ("down", (D, 12)))},
    **{f"mlp.experts.{expert}.{kind}_proj": shape for expert in range(NUM_EXPERTS)
       for kind, shape in (("gate", (16, D)), ("up", (16, D)), ("down", (D, 16)))},
}  # fmt: skip


def target_info() -> TargetInfo:
    draw = torch.Generator().manual_seed(99)
    embedding, head = torch.randn(2, V, D, generator=draw, dtype=torch.float64)
    return TargetInfo(
        hidden_size=D, vocab_size=V, num_layers=NUM_LAYERS, dtype=torch.float64,
        device=torch.device("cpu"), embedding=embedding, lm_head=head, max_seq_len=64,
    )  # fmt: skip


class Case:
    """A checkpoint in one published layout, and what its modules compute, by the formulas."""

    layout = "deepseek"
    modules = 2
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {**DEEPSEEK, **DENSE}
    config: ClassVar[dict[str, Any]] = {"model_type": "llama"}
    hidden_first = own_head = plus_one = False
    rotary = HEAD
    parts = ("enorm", "hnorm", "eh_proj", "shared_head.norm")

    def __init__(self) -> None:
        self.info = target_info()
        draw = torch.Generator().manual_seed(3)
        self.weights: dict[str, Tensor] = {}
        for index in range(self.modules):
            for name, shape in self.shapes.items():
                noise = torch.randn(shape, generator=draw, dtype=torch.float64)
                norm = len(shape) == 1 and not name.endswith("bias")
                scaled = noise * 0.2 if len(shape) == 1 else noise * 1.2 / math.sqrt(shape[-1])
                full = name if name.endswith("bias") else f"{name}.weight"
                self.weights[self.name(index, full)] = scaled + (norm and not self.plus_one)

    def raw(self) -> dict[str, Any]:
        return {**SIZES, "num_nextn_predict_layers": self.modules, **self.config}

    def name(self, index: int, rest: str) -> str:
        return f"model.layers.{NUM_LAYERS + index}.{rest}"

    def write(self, folder: Path, extra: dict[str, Tensor] | None = None) -> Path:
        tensors = {
            "model.embed_tokens.weight": self.info.embedding, "lm_head.weight": self.info.lm_head,
            "model.layers.0.input_layernorm.weight": torch.ones(D), **self.weights, **(extra or {}),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw()))
        kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    # --- the formulas ---

    def get(self, index: int, name: str) -> Tensor | None:
        return self.weights.get(self.name(index, name))

    def linear(self, x: Tensor, index: int, name: str) -> Tensor:
        weight = self.get(index, f"{name}.weight")
        assert weight is not None, name
        return functional.linear(x, weight, self.get(index, f"{name}.bias"))

    def norm(self, x: Tensor, index: int, name: str) -> Tensor:
        weight = self.get(index, f"{name}.weight")
        if weight is None:
            return x
        y = x * (x.square().mean(-1, keepdim=True) + SIZES["rms_norm_eps"]).rsqrt()
        return y * (1 + weight if self.plus_one else weight)

    def rope(self, x_TNH: Tensor) -> Tensor:
        half = self.rotary // 2
        angle = torch.arange(len(x_TNH)).double()[:, None] * SIZES["rope_theta"] ** (
            -torch.arange(half).double() / half
        )
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        turned = torch.complex(x_TNH[..., :half], x_TNH[..., half : self.rotary]) * turn
        return torch.cat([turned.real, turned.imag, x_TNH[..., self.rotary :]], -1)

    def heads(self, x_TD: Tensor, index: int, kind: str) -> Tensor:
        return self.linear(x_TD, index, f"self_attn.{kind}_proj").unflatten(-1, (-1, HEAD))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int = 0) -> Tensor:
        """Causal attention over [T, N, H]."""
        outputs = []
        for row in range(len(query)):
            first = max(0, row - window + 1) if window else 0
            seen = slice(first, row + 1)
            per_head = []
            for head in range(query.shape[1]):
                shared = head // (query.shape[1] // key.shape[1])
                score = key[seen, shared] @ query[row, head] / math.sqrt(HEAD)
                per_head.append(score.softmax(0) @ value[seen, shared])
            outputs.append(torch.stack(per_head))
        return torch.stack(outputs)

    def attention(self, x_TD: Tensor, index: int) -> Tensor:
        query, key, value = (self.heads(x_TD, index, kind) for kind in "qkv")
        query = self.rope(self.norm(query, index, "self_attn.q_norm"))
        key = self.rope(self.norm(key, index, "self_attn.k_norm"))
        seen = self.attend(query, key, value).flatten(1)
        return self.linear(seen, index, "self_attn.o_proj")

    def mlp(self, x_TD: Tensor, index: int, prefix: str = "mlp") -> Tensor:
        gate = functional.silu(self.linear(x_TD, index, f"{prefix}.gate_proj"))
        up = self.linear(x_TD, index, f"{prefix}.up_proj")
        return self.linear(gate * up, index, f"{prefix}.down_proj")

    def module(
        self, index: int, ids_T: Tensor, hidden_TD: Tensor, mask_first: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, head input and recycled hidden state of every row."""
        enorm, hnorm, proj, last = self.parts
        embed = self.info.embedding[ids_T].clone()
        if mask_first:
            embed[0] = 0
        pair = [self.norm(embed, index, enorm), self.norm(hidden_TD, index, hnorm)]
        x = self.linear(torch.cat(pair[::-1] if self.hidden_first else pair, -1), index, proj)
        x = x + self.attention(self.norm(x, index, "input_layernorm"), index)
        x = x + self.mlp(self.norm(x, index, "post_attention_layernorm"), index)
        post = self.norm(x, index, last)
        return post @ self.head(index).T, post, x if self.layout == "step" else post

    def head(self, index: int) -> Tensor:
        return self.info.lm_head


class Qwen2(Case):
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        **DEEPSEEK, **DENSE, "self_attn.q_proj.bias": (HEADS * HEAD,),
        "self_attn.k_proj.bias": (KV_HEADS * HEAD,), "self_attn.v_proj.bias": (KV_HEADS * HEAD,),
    }  # fmt: skip
    config: ClassVar[dict[str, Any]] = {"model_type": "qwen2"}


class MiMo(Qwen2):
    layout, modules, hidden_first = "mimo", 1, True
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        **MIMO, **{name: shape for name, shape in Qwen2.shapes.items() if name not in DEEPSEEK}
    }  # fmt: skip
    config: ClassVar[dict[str, Any]] = {"model_type": "mimo"}
    parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")

    def name(self, index: int, rest: str) -> str:
        return f"model.mtp_layers.{index}.{rest}"


class Speculators(Case):
    layout, modules = "speculators", 1
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {**MIMO, **DENSE, **QK_NORMS}
    parts = MiMo.parts

    def raw(self) -> dict[str, Any]:
        method = {"proposal_type": "greedy", "speculative_tokens": 4}
        return {
            "speculators_model_type": "mtp", "architectures": ["MTPDraftModel"],
            "transformer_layer_config": {**SIZES, "model_type": "qwen3"},
            "speculators_config": {"algorithm": "mtp", "proposal_methods": [method]},
        }  # fmt: skip

    def name(self, index: int, rest: str) -> str:
        return f"mtp_layers.{index}.{rest}"


class Qwen3Next(Case):
    layout, plus_one, rotary = "qwen3_next", True, HEAD // 4
    parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "fc": (D, 2 * D), "pre_fc_norm_embedding": (D,), "pre_fc_norm_hidden": (D,), "norm": (D,),
        **ATTENTION, "self_attn.q_proj": (2 * HEADS * HEAD, D), **QK_NORMS, **NORMS, **QWEN_MOE,
    }  # fmt: skip
    config: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3_next", "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12, "norm_topk_prob": True,
        "partial_rotary_factor": 0.25, "num_nextn_predict_layers": None,
    }  # fmt: skip

    def name(self, index: int, rest: str) -> str:
        of_module = rest.rsplit(".", 1)[0] in self.parts
        return f"mtp.{rest}" if of_module else f"mtp.layers.{index}.{rest}"

    def attention(self, x_TD: Tensor, index: int) -> Tensor:
        both = self.linear(x_TD, index, "self_attn.q_proj").unflatten(-1, (HEADS, 2 * HEAD))
        query = self.rope(self.norm(both[..., :HEAD], index, "self_attn.q_norm"))
        key = self.rope(self.norm(self.heads(x_TD, index, "k"), index, "self_attn.k_norm"))
        seen = self.attend(query, key, self.heads(x_TD, index, "v"))
        return self.linear(
            (seen * both[..., HEAD:].sigmoid()).flatten(1), index, "self_attn.o_proj"
        )

    def mlp(self, x_TD: Tensor, index: int, prefix: str = "mlp") -> Tensor:
        gate = self.linear(x_TD, index, "mlp.shared_expert_gate").sigmoid()
        output = gate * super().mlp(x_TD, index, "mlp.shared_expert")
        best, chosen = self.linear(x_TD, index, "mlp.gate").softmax(-1).topk(2)
        for row, x_D in enumerate(x_TD):
            for share, expert in zip(best[row] / best[row].sum(), chosen[row], strict=True):
                output[row] += share * super().mlp(x_D, index, f"mlp.experts.{int(expert)}")
        return output


class Qwen35Moe(Qwen3Next):
    """The text model's config under text_config, and the experts of a layer in one tensor."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        **{name: shape for name, shape in Qwen3Next.shapes.items() if ".experts." not in name},
        "mlp.experts.gate_up_proj": (NUM_EXPERTS, 32, D),
        "mlp.experts.down_proj": (NUM_EXPERTS, D, 16),
    }
    kind, prefix = "qwen3_5_moe", "mtp."

    def raw(self) -> dict[str, Any]:
        text = {key: value for key, value in super().raw().items() if "rotary" not in key}
        text |= {
            "model_type": f"{self.kind}_text", "mtp_num_hidden_layers": self.modules,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": text.pop("rope_theta"),
                "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                "mrope_section": [1, 0, 0],
            },
        }  # fmt: skip
        return {
            "model_type": self.kind, "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "text_config": text, "vision_config": {},
        }  # fmt: skip

    def name(self, index: int, rest: str) -> str:
        rest = rest.removesuffix(".weight") if ".experts." in rest else rest
        return self.prefix + super().name(index, rest).removeprefix("mtp.")

    def linear(self, x: Tensor, index: int, name: str) -> Tensor:
        if ".experts." not in name:
            return super().linear(x, index, name)
        *_, expert, kind = name.split(".")
        fused = "down_proj" if kind == "down_proj" else "gate_up_proj"
        matrix = self.weights[self.name(index, f"mlp.experts.{fused}")][int(expert)]
        half = {"gate_proj": slice(16), "up_proj": slice(16, 32)}.get(kind, slice(None))
        return functional.linear(x, matrix[half])


class Qwen35(Qwen35Moe):
    """Dense, and named as inside the wrapper."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        **{name: shape for name, shape in Qwen3Next.shapes.items() if not name.startswith("mlp.")},
        **MLP,
    }
    kind, prefix = "qwen3_5", "model.language_model.mtp."

    def mlp(self, x_TD: Tensor, index: int, prefix: str = "mlp") -> Tensor:
        return Case.mlp(self, x_TD, index, prefix)


class Qwen3NextDense(Qwen3Next):
    """The tensors say that these modules have no experts, though the target's layers do."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = Qwen35.shapes

    def mlp(self, x_TD: Tensor, index: int, prefix: str = "mlp") -> Tensor:
        return Case.mlp(self, x_TD, index, prefix)


class Step(Case):
    layout, plus_one, own_head, modules, rotary = "step", True, True, 3, HEAD // 2
    window, heads_of_window = 4, 6
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "transformer.shared_head.norm": (D,),
        "transformer.shared_head.output": (V, D), **DENSE, **QK_NORMS,
        "self_attn.q_proj": (6 * HEAD, D), "self_attn.o_proj": (D, 6 * HEAD),
        "self_attn.g_proj": (6, D),
    }  # fmt: skip
    parts = ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")
    config: ClassVar[dict[str, Any]] = {
        "model_type": "step3p5", "num_attention_groups": KV_HEADS, "sliding_window": 4,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 6,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": KV_HEADS},
        "rope_theta": [SIZES["rope_theta"]] * 7, "partial_rotary_factors": [0.5] * 7,
        "moe_layers_enum": "1,2,3", "n_routed_experts": 4, "moe_top_k": 2,
        "swiglu_limits_shared": [0.0] * 5 + [0.5, 0.0],
    }  # fmt: skip

    def raw(self) -> dict[str, Any]:
        return {key: value for key, value in super().raw().items() if key != "num_key_value_heads"}

    def attention(self, x_TD: Tensor, index: int) -> Tensor:
        query, key, value = (self.heads(x_TD, index, kind) for kind in "qkv")
        query = self.rope(self.norm(query, index, "self_attn.q_norm"))
        key = self.rope(self.norm(key, index, "self_attn.k_norm"))
        gate = self.linear(x_TD, index, "self_attn.g_proj").sigmoid()
        seen = self.attend(query, key, value, self.window) * gate[..., None]
        return self.linear(seen.flatten(1), index, "self_attn.o_proj")

    def mlp(self, x_TD: Tensor, index: int, prefix: str = "mlp") -> Tensor:
        limit = self.config["swiglu_limits_shared"][NUM_LAYERS + index] or math.inf
        gate = functional.silu(self.linear(x_TD, index, "mlp.gate_proj")).clamp(max=limit)
        up = self.linear(x_TD, index, "mlp.up_proj").clamp(-limit, limit)
        return self.linear(gate * up, index, "mlp.down_proj")

    def head(self, index: int) -> Tensor:
        return self.weights[self.name(index, "transformer.shared_head.output.weight")]


CASES = {
    case.__name__: case
    for case in (
        Case, Qwen2, MiMo, Speculators, Qwen3Next, Qwen35Moe, Qwen35, Qwen3NextDense, Step,
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    made = CASES[request.param]()
    return made, made.write(tmp_path_factory.mktemp(request.param))


def load(folder: Path, info: TargetInfo, *, recycled: bool = False, **options: Any):
    return load_drafter(folder, info, options, recycled=recycled)


def rows(info: TargetInfo) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    ids_T = torch.randint(V, (ROWS,), generator=draw)
    hidden_TD = torch.randn(ROWS, D, generator=draw, dtype=torch.float64)
    return ids_T, torch.arange(ROWS), hidden_TD


@torch.no_grad()
@pytest.mark.parametrize("mask", [False, True], ids=["plain", "pos0_mask"])
def test_every_module_computes_the_formulas(case, mask):
    made, folder = case
    drafter = load(folder, made.info, pos0_mask=mask)
    assert drafter.config.layout == made.layout
    assert len(drafter.steps) == made.modules
    assert drafter.aux_layers == ((NUM_LAYERS,) if made.layout == "step" else (FINAL_NORM,))
    ids_T, position_T, hidden_TD = rows(made.info)
    for index, step in enumerate(drafter.steps):
        logits, head_input, recycled = made.module(index, ids_T, hidden_TD, mask)
        came_head, came_recycled = step(ids_T[None].int(), position_T[None].int(), hidden_TD[None])
        torch.testing.assert_close(came_head[0], head_input, **CLOSE)
        torch.testing.assert_close(came_recycled[0], recycled, **CLOSE)
        torch.testing.assert_close(step.logits(came_head)[0], logits, atol=2e-4, rtol=0.0)
        assert step.propose(came_head)[0].tolist() == logits.argmax(-1).tolist()
        hidden_TD = recycled


def test_what_the_target_has_is_held_once(case):
    made, folder = case
    drafter = load(folder, made.info)
    for index, step in enumerate(drafter.steps):
        assert step.embed_tokens.weight is made.info.embedding
        if made.own_head:
            assert torch.equal(step.lm_head.weight, made.head(index))
        else:
            assert step.lm_head.weight is made.info.lm_head


def test_the_first_module_alone_is_read_for_mtp_eagle(case):
    made, folder = case
    drafter = get_method("MTP_EAGLE").load(folder, made.info, {})
    assert len(drafter.steps) == 1
    assert drafter.num_draft_tokens == (4 if made.layout == "speculators" else made.modules)
    ids_T, position_T, hidden_TD = rows(made.info)
    assert drafter.combine(hidden_TD) is hidden_TD
    head_input, _ = drafter(ids_T[None], position_T[None], hidden_TD[None])
    wanted = made.module(0, ids_T, hidden_TD)[0].argmax(-1)
    assert drafter.propose(head_input)[0].tolist() == wanted.tolist()
    assert f"mtp {made.layout}" in drafter.describe()


def test_copies_of_embedding_and_head_are_recognised(tmp_path):
    made = Case()
    names = [made.name(0, "embed_tokens.weight"), made.name(0, "shared_head.head.weight")]
    extra = dict(zip(names, (made.info.embedding, made.info.lm_head), strict=True))
    extra[made.name(1, "shared_head.head.weight")] = made.info.lm_head + 1  # another one
    first, second = load(made.write(tmp_path, extra), made.info).steps
    assert first.embed_tokens.weight is made.info.embedding
    assert first.lm_head.weight is made.info.lm_head
    assert torch.equal(second.lm_head.weight, made.info.lm_head + 1)


def test_shards_of_the_target_alone_are_not_opened(tmp_path):
    made = Case()
    folder = made.write(tmp_path)
    (folder / "model.safetensors").unlink()
    save_file(made.weights, folder / "modules.safetensors")
    (folder / "target.safetensors").write_bytes(b"not to be read")
    files = dict.fromkeys(made.weights, "modules.safetensors")
    index = {"weight_map": {**files, "lm_head.weight": "target.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(load(folder, made.info).steps) == 2


def test_fp8_blocks_are_dequantised(tmp_path):
    """Block-wise scales as DeepSeek-V3 publishes them; blocks that the sizes do not divide."""
    made = Case()
    made.config = {**made.config, "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [16, 32]}}  # fmt: skip
    name = made.name(0, "eh_proj.weight")
    weight = made.weights[name]
    scale = torch.rand(2, 2) + 0.5
    spread = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)[:D, : 2 * D]
    made.weights[name] = (weight / spread).to(torch.float8_e4m3fn)
    made.weights[f"{name}_scale_inv"] = scale
    wanted = made.weights[name].float() * spread
    step = load(made.write(tmp_path / "fp8"), made.info).steps[0]
    assert torch.equal(step.eh_proj.weight, wanted.double())
    torch.testing.assert_close(step.eh_proj.weight, weight, atol=0.1, rtol=0.07)
    made.weights[f"{name}_scale_inv"] = scale[:1]
    with pytest.raises(CheckpointError, match=r"expected \[2, 2\] scales"):
        load(made.write(tmp_path / "short"), made.info)
    del made.weights[f"{name}_scale_inv"]
    with pytest.raises(NotSupported, match=r"eh_proj.weight is quantised \(fp8\)"):
        load(made.write(tmp_path / "bare"), made.info)


def test_what_is_wrong_is_listed(tmp_path):
    made = Case()

    def refused(error: type[Exception], words: str, made: Case = made, **options: Any) -> None:
        with pytest.raises(error, match=words):
            load(made.write(tmp_path / "wrong"), made.info, **options)

    weight = made.weights.pop(made.name(1, "mlp.up_proj.weight"))
    refused(CheckpointError, r"missing: steps\.1\.block\.mlp\.up_proj\.weight")
    made.weights[made.name(1, "mlp.up_proj.weight")] = weight[:-1].clone()
    refused(CheckpointError, r"wrong shape: .*up_proj.weight \(expected \[40, 24\], got \[39")
    made.weights[made.name(1, "mlp.up_proj.weight")] = weight
    made.weights[made.name(0, "mlp.extra.weight")] = weight
    refused(CheckpointError, r"unexpected: steps\.0\.block\.mlp\.extra\.weight")
    del made.weights[made.name(0, "mlp.extra.weight")]
    made.weights[made.name(0, "mlp.up_proj.weight_packed")] = weight
    refused(NotSupported, "weight_packed is quantised")
    del made.weights[made.name(0, "mlp.up_proj.weight_packed")]

    def with_config(**changes: Any) -> Case:
        other = Case()
        other.config = {**other.config, **changes}
        return other

    refused(CheckpointError, "config.json says 3 MTP modules", with_config(
        num_nextn_predict_layers=3))  # fmt: skip
    refused(NotSupported, "model_type 'kimi_linear'", with_config(model_type="kimi_linear"))
    refused(NotSupported, "'deepseek_v4' are not built, because their keys are compressed; known",
            with_config(model_type="deepseek_v4"))  # fmt: skip
    refused(NotSupported, "rope type 'dynamic'", with_config(
        rope_scaling={"rope_type": "dynamic", "factor": 2.0}))  # fmt: skip
    refused(DraftMismatch, "hidden size 48, the target has 24", with_config(hidden_size=48))
    refused(DraftMismatch, "vocabulary 32, the target has 31", with_config(vocab_size=32))
    refused(InvalidOption, "chain must be one of", chain="rows")
    refused(InvalidOption, "pos0_mask must be True or False", pos0_mask=1)
    bare = Case()
    bare.weights = {}
    refused(CheckpointError, "holds no MTP modules", bare)
