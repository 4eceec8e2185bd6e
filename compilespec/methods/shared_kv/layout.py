"""The layout of an assistant's checkpoint: the published `gemma4_assistant` config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compilespec.errors import CheckpointError
from compilespec.errors.suggest import not_one_of
from compilespec.methods.shared_kv.config import QUERY_POSITIONS, AssistantConfig, find_layer
from compilespec.tracing.target_info import TargetInfo


def read_assistant_config(
    raw: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    target: TargetInfo,
    *,
    query_position: str = "bonus",
) -> AssistantConfig:
    """Read config.json and the tensors' names and shapes; find the target layers it reads.

    Raises:
        CheckpointError: another format, or an incomplete config.
        DraftMismatch: the target has no such layers, or their sizes differ.
        InvalidOption: an unknown query position.
        NotSupported: a rope type that is not built.
    """
    if query_position not in QUERY_POSITIONS:
        raise not_one_of("query_position", query_position, QUERY_POSITIONS)
    text = raw.get("text_config")
    if raw.get("model_type") != "gemma4_assistant" or not isinstance(text, Mapping):
        raise CheckpointError(
            f"expected a config.json of model_type 'gemma4_assistant' with a text_config, got "
            f"{raw.get('model_type')!r}"
        )
    wanted = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [key for key in (*wanted, "layer_types", "rope_parameters") if not text.get(key)]
    if missing:
        raise CheckpointError(f"text_config of the draft lacks {', '.join(missing)}")
    if raw.get("use_ordered_embeddings") and not raw.get("num_centroids"):
        raise CheckpointError("config.json of the draft lacks num_centroids")
    ordered = bool(raw.get("use_ordered_embeddings"))
    extra = int(query_position == "bonus")
    layers = []
    for index, layer_type in enumerate(text["layer_types"]):
        norm = shapes.get(f"model.layers.{index}.self_attn.q_norm.weight")
        if norm is None:
            raise CheckpointError(f"the draft lacks model.layers.{index}.self_attn.q_norm.weight")
        is_sliding = layer_type == "sliding_attention"
        window = int(text.get("sliding_window") or 512) + extra if is_sliding else 0
        rope = tuple(sorted(dict(text["rope_parameters"].get(layer_type) or {}).items()))
        layers.append(
            find_layer(
                target, layer_type, head_dim=norm[0], window=window, rope=rope,
                num_heads=text["num_attention_heads"],
            )
        )  # fmt: skip
    return AssistantConfig(
        hidden_size=text["hidden_size"],
        backbone_hidden_size=raw.get("backbone_hidden_size", 1536),
        intermediate_size=text["intermediate_size"],
        num_heads=text["num_attention_heads"],
        vocab_size=text["vocab_size"],
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        hidden_act=text.get("hidden_activation", "gelu_pytorch_tanh"),
        layers=tuple(layers),
        query_position="bonus" if query_position == "bonus" else "last_written",
        num_centroids=raw["num_centroids"] if ordered else 0,
        centroid_top_k=raw.get("centroid_intermediate_top_k", 32) if ordered else 0,
    )
