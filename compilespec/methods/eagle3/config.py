"""One EAGLE-3 head, in any checkpoint format.

What the tensors can tell (biases, own embedding, own head, sizes) is taken from them; what they
cannot (residual, norms, rope) is taken from config.json, which `layout.py` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compilespec.errors import CheckpointError
from compilespec.methods.decoder_body import (
    WINDOW_KEYS,
    body_config,
    body_sizes,
    layer_windows,
    positive,
)
from compilespec.methods.eagle3.aux_layers import AuxIdsAre, resolve_aux_layers
from compilespec.methods.eagle3.layout import DEFAULT_NUM_DRAFT_TOKENS, Layout, read_format
from compilespec.methods.eagle3.supported import check_supported
from compilespec.methods.parts.d2t import vocabulary_fields


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """One EAGLE-3 head, in any checkpoint format."""

    layout: Layout
    """Tensor naming of its checkpoint; `save_head` writes either."""
    body: str
    """Decoder layer class: one of `BODIES`."""
    hidden_size: int
    """Width of the drafter."""
    target_hidden_size: int
    """Width of one aux hidden state of the target."""
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    """Decoder layers; the first takes [embedding, hidden], the others are ordinary."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of one head; need not be hidden_size / num_heads."""
    vocab_size: int
    """Target vocabulary, which the embedding and all token ids use."""
    draft_vocab_size: int
    """Rows of lm_head; smaller than `vocab_size` when d2t maps them."""
    rms_norm_eps: float
    """Epsilon of every RMSNorm."""
    hidden_act: str
    """Activation of the MLP gate."""
    max_position_embeddings: int
    """The draft's own limit in tokens; often smaller than the target's, and not enforced."""
    rope: tuple[tuple[str, Any], ...]
    """transformers' rope_parameters of the DRAFT config, as sorted items; never the target's."""
    window: int = 0
    """Sliding window of the attention in tokens, 0 for none."""
    windows: tuple[int, ...] = ()
    """The same by layer, where layers differ; else empty."""
    qkv_bias: bool = False
    """q, k and v projections have a bias."""
    out_bias: bool = False
    """The output projection has a bias."""
    mlp_bias: bool = False
    """The three MLP projections have a bias."""
    fc_bias: bool = False
    """fc has a bias."""
    norm_before_residual: bool = False
    """The residual starts from the normed hidden state instead of the raw one."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated aux hidden states."""
    fc_norm: bool = False
    """One RMSNorm per aux hidden state."""
    norm_output: bool = False
    """The recycled hidden state is the final norm's output instead of its input."""
    own_embedding: bool = False
    """The checkpoint has its own embedding; else the target's is used."""
    own_lm_head: bool = True
    """The checkpoint has its own output head; else the target's is used."""
    has_d2t: bool = False
    """Draft ids are mapped to target ids: target = draft + d2t[draft]."""
    aux_layers: tuple[int, ...]
    """Ascending hs indices: k is the residual stream entering layer k."""
    aux_source: str = "default"
    """Where `aux_layers` were found and how they were read."""
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    """K that the checkpoint suggests."""
    target_name: str | None = None
    """Directory or hub name of the target that it was trained for, if that is known."""
    target_architectures: tuple[str, ...] = ()
    """That target's classes, by transformers' names."""

    @property
    def qk_norm(self) -> bool:
        """RMSNorm over each head of query and key before the rotation."""
        return self.body == "qwen3"

    def describe(self) -> str:
        """The resolved spec on one line."""
        vocab = (
            f"{self.draft_vocab_size}/{self.vocab_size} (d2t)"
            if self.has_d2t
            else str(self.vocab_size)
        )
        flags = [
            name
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            if getattr(self, name)
        ]
        rope = dict(self.rope)
        return (
            f"eagle3 {self.layout} {self.body} x{self.num_layers}, hidden {self.hidden_size}, "
            f"heads {self.num_heads}/{self.num_kv_heads}x{self.head_dim}, vocab {vocab}, aux "
            f"hs{list(self.aux_layers)} ({self.aux_source}) of width {self.target_hidden_size}, "
            f"rope {rope['rope_type']} theta {rope['rope_theta']:g}, embedding "
            f"{'own' if self.own_embedding else 'target'}, lm_head "
            f"{'own' if self.own_lm_head else 'target'}{''.join(', ' + flag for flag in flags)}, K "
            f"{self.num_draft_tokens}"
        )


def normalise(
    raw: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    num_target_layers: int,
    *,
    aux_ids_are: AuxIdsAre = "auto",
    aux_layers: Sequence[int] | None = None,
    norm_before_residual: bool | None = None,
    kind: str = "eagle3",
) -> Eagle3Config:
    """Read config.json and the tensors' names and shapes into one `Eagle3Config`.

    Args:
        raw: config.json as it is.
        shapes: canonical tensor names (`layers.{i}.*`) and their shapes.
        num_target_layers: n, for the default aux layers and for the rule about their ids.
        aux_ids_are: what the ids in the config mean: hs indices, or layers whose OUTPUT is tapped.
        aux_layers: hs indices that replace what the config says.
        norm_before_residual: replaces the config's value.
        kind: speculators' name of the head's kind.
    Raises:
        CheckpointError: the config is incomplete or contradicts the tensors.
        NotSupported: a body, rope type or variant that is not built; the message names it.
        DraftMismatch: no aux ids in the config, and the target has too few layers for the default.
    """
    head = read_format(raw, kind)
    check_supported(head, shapes)
    fields = head.body_fields
    if fields.get("layer_types"):  # what has a window is said layer by layer
        fields = {key: value for key, value in fields.items() if key not in WINDOW_KEYS}
    layer = body_config(head.body, fields)
    target_width = positive(
        head.flag("target_hidden_size") or layer.hidden_size, "target_hidden_size"
    )
    indices, source = resolve_aux_layers(
        raw,
        num_target_layers,
        _num_aux(shapes["fc.weight"][1], target_width),
        aux_ids_are=aux_ids_are,
        aux_layers=aux_layers,
    )
    if norm_before_residual is None:
        norm_before_residual = head.is_on("norm_before_residual")
    return Eagle3Config(
        layout=head.layout,
        target_hidden_size=target_width,
        norm_before_residual=norm_before_residual,
        aux_layers=indices,
        aux_source=source,
        num_draft_tokens=head.num_draft_tokens,
        **_trained_for(raw),
        **body_sizes(head.body, layer),
        **vocabulary_fields(head.flag("draft_vocab_size"), layer.vocab_size, shapes),
        **_norms(head.is_on),
        **_biases(head.body, layer, shapes),
        windows=layer_windows(head.body_fields, layer.num_hidden_layers),
        own_embedding="embed_tokens.weight" in shapes or target_width != layer.hidden_size,
    )


def _trained_for(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The target that speculators' layout names."""
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return {
        "target_name": verifier.get("name_or_path"),
        "target_architectures": tuple(verifier.get("architectures") or ()),
    }


def _num_aux(fc_width: int, target_width: int) -> int:
    if fc_width % target_width:
        raise CheckpointError(
            f"fc.weight takes {fc_width} inputs, no multiple of target_hidden_size {target_width}; "
            "set target_hidden_size in config.json to the width of the target"
        )
    return fc_width // target_width


def _norms(is_on: Callable[..., bool]) -> dict[str, Any]:
    fc_norm = is_on("fc_norm", "use_aux_norm")
    return {
        "fc_norm": fc_norm,
        "norm_before_fc": is_on("norm_before_fc") and not fc_norm,
        "norm_output": is_on("norm_output", "return_hidden_post_norm"),
    }


def _biases(body: str, layer: Any, shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    return {
        "qkv_bias": body == "qwen2" or bool(getattr(layer, "attention_bias", False)),
        "out_bias": "layers.0.self_attn.o_proj.bias" in shapes,
        "mlp_bias": bool(getattr(layer, "mlp_bias", False)),
        "fc_bias": "fc.bias" in shapes,
    }
