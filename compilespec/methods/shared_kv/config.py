"""The published `gemma4_assistant` config.json, read into one `AssistantConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compilespec.errors import CheckpointError, DraftMismatch, NotSupported
from compilespec.errors.suggest import not_one_of
from compilespec.tracing.target_info import KVLayer, TargetInfo

QueryPosition = Literal["bonus", "last_written"]
QUERY_POSITIONS = ("bonus", "last_written")
LAYER_TYPES = ("sliding_attention", "full_attention")
ROPE_TYPES = ("default", "proportional")
DEFAULT_NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class AssistantLayer:
    """One decoder layer: its own queries on the keys and values of a target layer."""

    layer_type: str
    """"sliding_attention" or "full_attention"."""

    kv_layer: int
    """Target layer whose cache it reads: the last of its type that has its own keys."""

    kv: KVLayer
    """Sizes of that cache."""

    window: int
    """Keys that a query sees, 0 for all."""

    rope: tuple[tuple[str, Any], ...]
    """rope_type, rope_theta and their like, as sorted items."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """One query-only drafter."""

    hidden_size: int
    """H."""

    backbone_hidden_size: int
    """Hb, the target's hidden size."""

    intermediate_size: int
    """Width of the MLP."""

    num_heads: int
    """Query heads."""

    vocab_size: int
    """The target's vocabulary."""

    rms_norm_eps: float
    """Epsilon of every RMSNorm."""

    hidden_act: str
    """Activation of the MLP gate."""

    layers: tuple[AssistantLayer, ...]
    """The decoder layers, in order."""

    query_position: QueryPosition = "bonus"
    """Whose position the queries are rotated by."""

    num_centroids: int = 0
    """Clusters of the ordered head; 0: a plain head over the whole vocabulary."""

    centroid_top_k: int = 0
    """Clusters whose tokens are scored."""

    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    """K that the checkpoint suggests."""

    def describe(self) -> str:
        """The resolved spec on one line."""
        reads = ", ".join(f"{layer.layer_type} of layer {layer.kv_layer}" for layer in self.layers)
        head = (
            f"ordered head of {self.centroid_top_k}/{self.num_centroids} clusters"
            if self.num_centroids
            else "head over all tokens"
        )
        return (
            f"shared_kv assistant x{len(self.layers)}, hidden {self.hidden_size} of "
            f"{self.backbone_hidden_size}, reads {reads}, {head}, query position "
            f"{self.query_position}, K {self.num_draft_tokens}"
        )


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


def find_layer(
    target: TargetInfo,
    layer_type: str,
    *,
    head_dim: int,
    window: int,
    rope: tuple[tuple[str, Any], ...],
    num_heads: int,
) -> AssistantLayer:
    """The target's last layer of this type that has its own keys.

    Raises: DraftMismatch, NotSupported, CheckpointError (an unknown layer type).
    """
    if layer_type not in LAYER_TYPES:
        raise CheckpointError(f"the draft has a layer of type {layer_type!r}; known: {LAYER_TYPES}")
    rope_type = dict(rope).get("rope_type")
    if rope_type not in ROPE_TYPES or "rope_theta" not in dict(rope):
        raise NotSupported(
            f"draft rope {dict(rope)} of {layer_type} is not built; built: {', '.join(ROPE_TYPES)} "
            "with a rope_theta"
        )
    is_sliding = layer_type == "sliding_attention"
    found: list[tuple[int, KVLayer]] = [
        (index, layer)
        for index, layer in enumerate(target.kv_layers)
        if bool(layer.window) == is_sliding and layer.producer == index
    ]
    if not found:
        raise DraftMismatch(
            f"the draft reads keys of {layer_type} and the target has no such layer; this is the "
            "draft of another target"
        )
    index, layer = found[-1]
    if layer.key_dim != head_dim or num_heads % layer.num_heads:
        raise DraftMismatch(
            f"the draft's queries are {num_heads} heads of {head_dim}, the keys of target layer "
            f"{index} {layer.num_heads} of {layer.key_dim}: this is the draft of another target"
        )
    return AssistantLayer(
        layer_type=layer_type,
        kv_layer=index,
        kv=layer,
        window=window,
        rope=rope,
    )
