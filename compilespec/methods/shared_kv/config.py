"""One query-only drafter, and the target layers whose caches it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from compilespec.errors import CheckpointError, DraftMismatch, NotSupported
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
