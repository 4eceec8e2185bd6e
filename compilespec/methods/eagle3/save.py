"""Writing a head as a checkpoint directory, in the layouts that other engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.decoder_body import SLIDING
from compilespec.methods.eagle3.config import Eagle3Config
from compilespec.methods.eagle3.drafter import Eagle3Drafter
from compilespec.methods.eagle3.layout import Layout
from compilespec.methods.parts.d2t import target_ids

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
MODEL_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def save_head(drafter: Drafter, directory: str | Path, layout: Layout = "safeailab") -> Path:
    """Write config.json and model.safetensors; `Method.load` reads either layout back.

    Layout "safeailab" names the first layer `midlayer.*`, leaves out matrices shared with the
    target, and has no field for K or the target.  Layout "speculators" names it `layers.0.*` and
    always writes the embedding and the head; its library loads the target by the name in it.

    Raises:
        InvalidOption: another kind of drafter, or an unknown layout.
    """
    if not isinstance(drafter, Eagle3Drafter):
        raise InvalidOption(f"save_head writes an Eagle3Drafter, got {type(drafter).__name__}")
    if layout not in ("safeailab", "speculators"):
        raise InvalidOption(
            f"save_head: layout must be 'safeailab' or 'speculators', got {layout!r}"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = drafter.config
    raw = _flat_config(config) if layout == "safeailab" else _speculators_config(config)
    raw["dtype"] = str(drafter.fc.weight.dtype).removeprefix("torch.")
    (directory / "config.json").write_text(
        json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    tensors = _tensors(drafter, layout)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(drafter: Eagle3Drafter, layout: Layout) -> dict[str, Tensor]:
    config = drafter.config
    tensors = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    if drafter.d2t is not None:
        mask = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask[target_ids(drafter.d2t.cpu())] = True
        tensors["t2d"] = mask
    if layout == "speculators":
        return tensors
    if not config.own_embedding:
        del tensors["embed_tokens.weight"]
    if not config.own_lm_head:
        del tensors["lm_head.weight"]
    return {
        "midlayer." + name.removeprefix("layers.0.")
        if name.startswith("layers.0.")
        else name: tensor
        for name, tensor in tensors.items()
    }


def _flat_config(config: Eagle3Config) -> dict[str, Any]:
    rope = dict(config.rope)
    theta = rope.pop("rope_theta")
    return {
        "architectures": [
            ARCHITECTURES.get(config.body, f"Eagle3{config.body.capitalize()}ForCausalLM")
        ],
        **layer_fields(config),
        **_head_fields(config),
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }


def _speculators_config(config: Eagle3Config) -> dict[str, Any]:
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "architectures": list(config.target_architectures),
                "name_or_path": config.target_name,
            },
        },
        **_head_fields(config),
        "transformer_layer_config": {**layer_fields(config), "rope_parameters": dict(config.rope)},
    }


def _head_fields(config: Eagle3Config) -> dict[str, Any]:
    same_width = config.target_hidden_size == config.hidden_size
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if same_width else config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "tie_word_embeddings": False,
        **{flag: getattr(config, flag) for flag in MODEL_FLAGS},
    }


def _layer_types(config: Eagle3Config) -> dict[str, Any]:
    types = [SLIDING if window else "full_attention" for window in config.windows]
    return {"layer_types": types} if any(config.windows) else {}


def layer_fields(config: Eagle3Config) -> dict[str, Any]:
    """The decoder layer's part of a config.json, without its rotary parameters."""
    return {
        "model_type": config.body,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": max(config.windows, default=config.window) or None,
        **_layer_types(config),
        "bias": config.fc_bias,
    }
