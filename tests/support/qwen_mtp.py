"""Tiny random checkpoints of Qwen3-Next and Qwen3.5 as published: in shards, MTP head included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compilespec.methods.mtp.random_modules import random_modules
from tests.support.models import VOCAB, target_info
from tests.support.mtp import per_expert

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
MAX_POSITIONS = 128
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "max_position_embeddings": MAX_POSITIONS, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
_ROPE = {
    "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25,
    "mrope_interleaved": True, "mrope_section": [2, 1, 1],
}  # fmt: skip
_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
_INTO_STREAM = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
_PUBLISHED = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
    "norm": "norm",
}  # fmt: skip


def whole_model(family: str, *, is_tied: bool = False) -> nn.Module:
    """The model as published: Qwen3.5 with its image tower around the text model.  Float64.

    The last token weighs more than those before it, so that a head can guess.
    """
    torch.manual_seed(11)
    if family == "qwen3_next":
        config: Any = transformers.Qwen3NextConfig(**_TEXT, **_EXPERTS)
        model: Any = transformers.Qwen3NextForCausalLM(config)
    else:
        routed = family == "qwen3_5_moe"
        tied = {"tie_word_embeddings": is_tied}
        text = {**_TEXT, **tied, "rope_parameters": _ROPE, **(_EXPERTS if routed else {})}
        prefix = "Qwen3_5Moe" if routed else "Qwen3_5"
        config = getattr(transformers, f"{prefix}Config")(
            text_config=text, vision_config=_VISION, **tied
        )
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    if family != "qwen3_5":
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[-1] ** 0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith(_INTO_STREAM):
                parameter.mul_(0.12)
        model.get_input_embeddings().weight.mul_(4)
    return model.to(torch.float64).eval()


def mtp_tensors(model: nn.Module, num_modules: int, *, fused: bool) -> dict[str, Tensor]:
    """`mtp.*` of a head for `model`, which guesses from the last token; fc and norms are those of
    the first module.
    """
    text = model.config.get_text_config()
    drafter = random_modules(
        target_info(model, MAX_POSITIONS), num_modules, seed=3, body=text.model_type,
        **text.to_dict(),
    )  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for index, step in enumerate(drafter.steps):
        for name, tensor in step.state_dict().items():
            stem = name.rpartition(".")[0]
            if name.startswith("block."):
                rest = name.removeprefix("block.")
                tensors |= per_expert(f"mtp.layers.{index}.{rest}", tensor, fused=fused)
            elif index == 0 and stem in _PUBLISHED:
                tensors[f"mtp.{_PUBLISHED[stem]}.weight"] = tensor.clone()
    embed = torch.eye(48, dtype=torch.float64)
    tensors["mtp.fc.weight"] = torch.cat([embed, tensors["mtp.fc.weight"][:, 48:] * 0.1], 1)
    for name in tensors:
        if name.endswith(_INTO_STREAM):
            tensors[name] = tensors[name] * 0.2
    return tensors


def publish(
    family: str, folder: Path, *, num_modules: int = 1, fused: bool = False, is_tied: bool = False
) -> nn.Module:
    """Write `folder` as the family is published and return the whole model.

    Args:
        fused: a layer's experts in one tensor, as in later checkpoints.
        is_tied: one matrix is embedding and head, as in the smallest of Qwen3.5.
    """
    model = whole_model(family, is_tied=is_tied)
    model.save_pretrained(folder)
    own = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if fused:
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(own)
    shards = {
        "model-1-of-3.safetensors": {name: own[name] for name in names[::2]},
        "model-2-of-3.safetensors": {name: own[name] for name in names[1::2]},
        "model-3-of-3.safetensors": mtp_tensors(model, num_modules, fused=fused),
    }
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if family != "qwen3_next":
        raw = json.loads((folder / "config.json").read_text())
        raw["text_config"] |= {
            "mtp_num_hidden_layers": num_modules, "mtp_use_dedicated_embeddings": False
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(raw))
    return model
