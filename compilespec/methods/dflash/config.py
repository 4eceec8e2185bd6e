"""One DFlash drafter, in any checkpoint format.

Three are published: speculators' (the decoder layers under `transformer_layer_config`), the
authors' (flat, with a nested `dflash_config`) and transformers' (flat; other names of two tensors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.decoder_body import (
    BODIES,
    SLIDING,
    WINDOW_KEYS,
    body_config,
    body_sizes,
    layer_windows,
    positive,
)
from compilespec.methods.dflash.layout import Layout, first_given, read_layout
from compilespec.methods.mask_token import read_mask_token
from compilespec.methods.parts.d2t import vocabulary_fields

# What a row of a layer with a window sees: "anchor", the window before the block and the rows of
# the block, or "causal", those up to itself; "distance", what is no further than the window.
Sight = Literal["anchor", "causal", "distance"]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """One DFlash drafter, in any checkpoint format."""

    layout: Layout
    """Where its checkpoint keeps what."""
    hidden_size: int
    """Width of the drafter."""
    target_hidden_size: int
    """Width of one aux hidden state of the target."""
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of one head."""
    vocab_size: int
    """Target vocabulary, which the embedding and all token ids use."""
    draft_vocab_size: int
    """Rows of lm_head; smaller than `vocab_size` when d2t maps them."""
    rms_norm_eps: float
    """Epsilon of every RMSNorm."""
    hidden_act: str
    """Activation of the MLP gate."""
    max_position_embeddings: int
    """The draft's own limit in tokens; not enforced."""
    rope: tuple[tuple[str, Any], ...]
    """transformers' rope_parameters of the DRAFT config, as sorted items."""
    windows: tuple[int, ...]
    """By layer: how much of the context it sees, 0 for all."""
    sight: Sight = "anchor"
    """What the window is measured from, and whether the block's rows see later ones."""
    qkv_bias: bool = False
    """q, k and v projections have a bias."""
    out_bias: bool = False
    """The output projection has a bias."""
    mlp_bias: bool = False
    """The three MLP projections have a bias."""
    own_embedding: bool = False
    """The checkpoint has its own embedding; else the target's is used."""
    own_lm_head: bool = False
    """The checkpoint has its own output head; else the target's is used."""
    has_d2t: bool = False
    """Draft ids are mapped to target ids: target = draft + d2t[draft]."""
    aux_layers: tuple[int, ...]
    """hs indices in the order in which fc takes them; FINAL_NORM for what enters the head."""
    aux_source: str
    """Where `aux_layers` were found and how they were read."""
    block_size: int
    """Rows of a block: the newest token and masks."""
    mask_token_id: int
    """The token whose embedding stands for those that are not known yet."""
    sample_from_anchor: bool = False
    """The row of the newest token proposes too: row i the token after it, not the one at it."""
    num_draft_tokens: int
    """K that the checkpoint suggests."""

    @property
    def num_proposing_rows(self) -> int:
        """Drafts that a block can give."""
        return self.block_size - (not self.sample_from_anchor)

    def describe(self) -> str:
        """The resolved spec on one line."""
        vocab = f"{self.draft_vocab_size}/" * self.has_d2t + str(self.vocab_size)
        rope = dict(self.rope)
        windows = f", windows {list(self.windows)} ({self.sight})" if any(self.windows) else ""
        return (
            f"dflash {self.layout} x{self.num_layers}, hidden {self.hidden_size}, heads "
            f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}, vocab {vocab}, aux "
            f"hs{list(self.aux_layers)} ({self.aux_source}), rope {rope['rope_type']} theta "
            f"{rope['rope_theta']:g}{windows}, embedding "
            f"{'own' if self.own_embedding else 'target'}, lm_head "
            f"{'own' if self.own_lm_head else 'target'}, block {self.block_size}, mask token "
            f"{self.mask_token_id}{', sample_from_anchor' * self.sample_from_anchor}, K "
            f"{self.num_draft_tokens}"
        )


def normalise(
    raw: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    vocab_size: int,
    num_target_layers: int,
    *,
    aux_layers: Sequence[int] | None = None,
    kind: str = "dflash",
) -> DFlashConfig:
    """Read config.json and the tensors' names and shapes into one `DFlashConfig`.

    Args:
        raw: config.json as it is; shapes: of the tensors, by the drafter module's names.
        vocab_size, num_target_layers: the target's.
        aux_layers: hs indices that replace what the config says.
        kind: speculators' name of the drafter's kind.
    Raises: CheckpointError, NotSupported, DraftMismatch, InvalidOption.
    """
    layout, body, places = read_layout(raw, kind)
    fields = {"vocab_size": vocab_size, **body}
    model_type = fields.get("model_type")
    layer_class = str(model_type) if model_type in BODIES else "qwen3"
    layer = body_config(
        layer_class, {k: v for k, v in _one_rope(fields).items() if k not in WINDOW_KEYS}
    )
    default = [SLIDING] * layer.num_hidden_layers if layout == "transformers" else None
    indices, source = _aux_layers(layout, places, aux_layers, num_target_layers)
    fc_width = shapes["fc.weight"][1]
    if fc_width % len(indices):
        raise CheckpointError(
            f"fc.weight takes {fc_width} inputs, no multiple of the {len(indices)} aux layers "
            f"hs{list(indices)} ({source})"
        )
    from_anchor = bool(first_given(places, "sample_from_anchor", kind == "dspark"))
    block_size = positive(first_given(places, "block_size", 8), "block_size")
    if block_size < 2 - from_anchor:
        raise CheckpointError(
            f"config.json of the draft: a block of {block_size} drafts nothing; block_size must be "
            "2 or more"
        )
    sizes = body_sizes(layer_class, layer)
    sizes.pop("body")
    sizes.pop("window")
    return DFlashConfig(
        layout=layout,
        target_hidden_size=fc_width // len(indices),
        aux_layers=indices,
        aux_source=source,
        block_size=block_size,
        mask_token_id=read_mask_token(places, ("mask_token_id",), vocab_size),
        sample_from_anchor=from_anchor,
        num_draft_tokens=_suggested(raw, block_size - (not from_anchor)),
        windows=layer_windows(fields, layer.num_hidden_layers, default)
        or (0,) * layer.num_hidden_layers,
        sight=_sight(layout, places),
        qkv_bias="layers.0.self_attn.q_proj.bias" in shapes,
        out_bias="layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="layers.0.mlp.gate_proj.bias" in shapes,
        **sizes,
        **vocabulary_fields(
            first_given(places, "draft_vocab_size", None), layer.vocab_size, shapes
        ),
        own_embedding="embed_tokens.weight" in shapes,
    )


def _one_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with one set of rotary parameters: of several that of layers with a window."""
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping) and SLIDING in rope:
        return {**fields, "rope_parameters": rope[SLIDING]}
    return dict(fields)


def _aux_layers(
    layout: Layout,
    places: tuple[Mapping[str, Any], ...],
    given: Sequence[int] | None,
    num_target_layers: int,
) -> tuple[tuple[int, ...], str]:
    """Which of the target's hidden states fc takes: speculators names hs indices, the others
    layers whose output is taken.
    """
    key = "aux_hidden_state_layer_ids" if layout == "speculators" else "target_layer_ids"
    ids, error = (first_given(places, key, None), CheckpointError) if given is None else (
        list(given), InvalidOption
    )  # fmt: skip
    name = key if given is None else "aux_layers"
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise error(
            f"{name}: expected a list of layer indices, got {ids!r}; give aux_layers=(hs indices)"
        )
    shift = int(layout != "speculators" and given is None)
    indices = tuple(one + shift for one in ids)
    source = "option" if given is not None else (
        f"{key} {ids} read as {'layer outputs' if shift else 'hs indices'}"
    )  # fmt: skip
    if len(set(indices)) < len(indices):
        raise error(f"{name}: the indices must be distinct, got {ids}")
    if min(indices) < 0 or max(indices) > num_target_layers:
        raise DraftMismatch(
            f"aux hidden states hs{list(indices)} ({source}) lie outside the target, which has "
            f"hs[0] to hs[{num_target_layers}]; is this the draft of another target?"
        )
    if shift and num_target_layers in indices:  # transformers gives that out behind the norm
        indices = tuple(FINAL_NORM if one == num_target_layers else one for one in indices)
        source += ", the last one's behind the norm"
    return indices, source


def _sight(layout: Layout, places: tuple[Mapping[str, Any], ...]) -> Sight:
    if layout != "speculators":
        return "distance"
    return "anchor" if first_given(places, "sliding_window_non_causal", False) else "causal"


def _suggested(raw: Mapping[str, Any], most: int) -> int:
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = positive(proposals[0].get("speculative_tokens") or most, "speculative_tokens")
    if count > most:
        raise CheckpointError(
            f"config.json of the draft: speculative_tokens is {count}, and a block of block_size "
            f"drafts {most}; block_size must be {count - most} more"
        )
    return count
