"""Every EAGLE-3 checkpoint format, normalised into one `Eagle3Config`.

Formats: the EAGLE authors' (tensors `midlayer.*`, a flat config), SpecForge's and NVIDIA's (the
same with a nested `eagle_config`), and speculators' (tensors `layers.0.*`, `speculators_model_type`
in the config).  The format is told by content, never by file name.  What the tensors can tell
(biases, own embedding, own head, sizes) is taken from them; what they cannot (residual, norms,
rope) is taken from config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import CONFIG_MAPPING

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, NotSupported

Layout = Literal["safeailab", "speculators"]
AuxIdsAre = Literal["auto", "hs", "output"]

BODIES = ("llama", "qwen2", "qwen3", "mistral")  # decoder layers the drafter module knows
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # their frequencies depend on the config alone
DEFAULT_NUM_DRAFT_TOKENS = 3

# The body's fields that are handed to transformers, which knows the defaults of each model type.
BODY_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
)
REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """One EAGLE-3 head, whatever format it came in."""

    layout: Layout
    """Tensor naming it came in; `save_head` writes either."""
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
    """The draft's own limit; often smaller than the target's, and not enforced."""
    rope: tuple[tuple[str, Any], ...]
    """transformers' rope_parameters of the DRAFT config, as sorted items; never the target's."""
    window: int = 0
    """Sliding window of the attention in tokens, 0 for none."""
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
    """The checkpoint brings its embedding; else it is the target's."""
    own_lm_head: bool = True
    """The checkpoint brings its output head; else it is the target's."""
    has_d2t: bool = False
    """Draft ids are mapped to target ids: target = draft + d2t[draft]."""
    aux_layers: tuple[int, ...]
    """Ascending hs indices: k is the residual stream entering layer k."""
    aux_source: str = "default"
    """Where `aux_layers` come from and how they were read."""
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    """K that the checkpoint suggests."""

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
            f"heads {self.num_heads}/{self.num_kv_heads}x{self.head_dim}, vocab {vocab}, "
            f"aux hs{list(self.aux_layers)} ({self.aux_source}) of width "
            f"{self.target_hidden_size}, "
            f"rope {rope['rope_type']} theta {rope['rope_theta']:g}, "
            f"embedding {'own' if self.own_embedding else 'target'}, lm_head "
            f"{'own' if self.own_lm_head else 'target'}"
            f"{''.join(', ' + flag for flag in flags)}, K {self.num_draft_tokens}"
        )


def normalise(
    raw: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    num_target_layers: int,
    *,
    aux_ids_are: AuxIdsAre = "auto",
    aux_layers: Sequence[int] | None = None,
    norm_before_residual: bool | None = None,
) -> Eagle3Config:
    """Read config.json and the tensors' names and shapes into one `Eagle3Config`.

    Args:
        raw: config.json as it is.
        shapes: canonical tensor names (`layers.{i}.*`) and their shapes.
        num_target_layers: n, for the default aux layers and for the rule about their ids.
        aux_ids_are: what the ids in the config mean: hs indices, or layers whose OUTPUT is tapped.
        aux_layers: hs indices that replace whatever the config says.
        norm_before_residual: replaces the config's value.
    Raises:
        CheckpointError: the config is incomplete or contradicts the tensors.
        NotSupported: a body, rope type or variant that is not built; the message names it.
        DraftMismatch: no aux ids in the config, and the target has too few layers for the default.
    """
    speculators = "speculators_model_type" in raw
    _refuse_variants(raw, shapes)
    flags = _Flags(raw)
    body_fields = raw.get("transformer_layer_config") if speculators else raw
    if not isinstance(body_fields, Mapping):
        raise CheckpointError("config.json: speculators format without transformer_layer_config")
    body = _body(body_fields, raw)
    layer = body_config(body, body_fields)
    rope = rope_parameters(layer)

    hidden_size = layer.hidden_size
    target_hidden_size = _positive(
        flags.get("target_hidden_size") or hidden_size, "target_hidden_size"
    )
    fc_width = shapes["fc.weight"][1]
    if fc_width % target_hidden_size:
        raise CheckpointError(
            f"fc.weight takes {fc_width} inputs, no multiple of target_hidden_size "
            f"{target_hidden_size}; "
            "set target_hidden_size in config.json to the width of the target"
        )
    resolved, aux_source = resolve_aux_layers(
        raw,
        num_target_layers,
        fc_width // target_hidden_size,
        aux_ids_are=aux_ids_are,
        aux_layers=aux_layers,
    )
    own_lm_head = "lm_head.weight" in shapes
    head_rows = shapes["lm_head.weight"][0] if own_lm_head else layer.vocab_size
    draft_vocab_size = _positive(flags.get("draft_vocab_size") or head_rows, "draft_vocab_size")
    if norm_before_residual is None:
        norm_before_residual = flags.on("norm_before_residual")
    return Eagle3Config(
        layout="speculators" if speculators else "safeailab",
        body=body,
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        intermediate_size=layer.intermediate_size,
        num_layers=layer.num_hidden_layers,
        num_heads=layer.num_attention_heads,
        num_kv_heads=layer.num_key_value_heads or layer.num_attention_heads,
        head_dim=getattr(layer, "head_dim", None) or hidden_size // layer.num_attention_heads,
        vocab_size=layer.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=layer.rms_norm_eps,
        hidden_act=layer.hidden_act,
        max_position_embeddings=layer.max_position_embeddings,
        rope=rope,
        window=(layer.sliding_window or 0) if body == "mistral" else 0,
        qkv_bias=body == "qwen2" or bool(getattr(layer, "attention_bias", False)),
        out_bias="layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias=bool(getattr(layer, "mlp_bias", False)),
        fc_bias="fc.bias" in shapes,
        norm_before_residual=norm_before_residual,
        norm_before_fc=flags.on("norm_before_fc") and not flags.on("fc_norm", "use_aux_norm"),
        fc_norm=flags.on("fc_norm", "use_aux_norm"),
        norm_output=flags.on("norm_output", "return_hidden_post_norm"),
        own_embedding="embed_tokens.weight" in shapes or target_hidden_size != hidden_size,
        own_lm_head=own_lm_head or draft_vocab_size != layer.vocab_size,
        has_d2t="d2t" in shapes or draft_vocab_size != layer.vocab_size,
        aux_layers=resolved,
        aux_source=aux_source,
        num_draft_tokens=_num_draft_tokens(raw),
    )


def resolve_aux_layers(
    raw: Mapping[str, Any],
    num_target_layers: int,
    num_aux: int,
    *,
    aux_ids_are: AuxIdsAre = "auto",
    aux_layers: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], str]:
    """Turn the ids of a config into ascending hs indices, and say how.

    `eagle_aux_hidden_state_layer_ids` has two meanings in the wild.  Automatic rule: at the top
    level the ids are hs indices; inside `eagle_config` they are layers whose output is tapped (hs
    index + 1 further), unless the largest id is n or the smallest is 2, which only hs indices can
    be.  No ids: hs 2, n//2, n-3.

    Raises:
        InvalidOption: aux_ids_are or aux_layers impossible.
        CheckpointError: the ids are no list of distinct integers, or another number than fc takes.
        DraftMismatch: an index lies outside the target, or the default indices coincide.
    """
    if aux_ids_are not in ("auto", "hs", "output"):
        raise InvalidOption(f"aux_ids_are: expected 'auto', 'hs' or 'output', came {aux_ids_are!r}")
    n = num_target_layers
    key = "eagle_aux_hidden_state_layer_ids"
    nested = (raw.get("eagle_config") or {}).get(key)
    if aux_layers is not None:
        if aux_ids_are != "auto":
            raise InvalidOption("give aux_layers (hs indices) or aux_ids_are, not both")
        indices, source = _distinct(aux_layers, "aux_layers", InvalidOption), "option"
    elif raw.get(key) or nested:
        ids = _distinct(raw.get(key) or nested, key, CheckpointError)
        where = "config" if raw.get(key) else "eagle_config"
        if aux_ids_are == "auto":
            are_hs = bool(raw.get(key)) or ids[-1] == n or ids[0] == 2
        else:
            are_hs = aux_ids_are == "hs"
        indices = ids if are_hs else tuple(index + 1 for index in ids)
        source = f"{where} ids {list(ids)} read as {'hs indices' if are_hs else 'layer outputs'}"
    else:
        indices, source = (2, n // 2, n - 3), "default"
        if not 2 < n // 2 < n - 3:
            raise DraftMismatch(
                "the draft names no aux layers, and the default (2, n//2, n-3) needs 7 target "
                "layers or more, "
                f"the target has {n}; give aux_layers=(hs indices)"
            )
    if len(indices) != num_aux:
        raise CheckpointError(
            f"fc takes {num_aux} aux hidden states, but {len(indices)} layers are named: "
            f"hs{list(indices)} ({source})"
        )
    if indices[0] < 0 or indices[-1] > n:
        raise DraftMismatch(
            f"aux hidden states hs{list(indices)} ({source}) lie outside the target, which has "
            f"hs[0] to hs[{n}]; "
            "is this the draft of another target, or should aux_ids_are= be the other meaning?"
        )
    return indices, source


class _Flags:
    """Looks a key up at the top level, then in the nested eagle_config."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.places = (raw, raw.get("eagle_config") or {})

    def get(self, key: str) -> Any:
        return next((place[key] for place in self.places if place.get(key) is not None), None)

    def on(self, *keys: str) -> bool:
        return any(bool(self.get(key)) for key in keys)


def _refuse_variants(raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
    flags = _Flags(raw)
    kind = raw.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise NotSupported(
            f"speculators_model_type {kind!r} is not built; eagle3 loads 'eagle3' only"
        )

    def has(part: str) -> bool:
        return any(part in name for name in shapes)

    if has("kv_a_proj") or has("q_a_proj"):
        raise NotSupported(
            "EAGLE-3 with an MLA body (kv_a_proj tensors) is not built; bodies: "
            + ", ".join(BODIES)
        )
    if has(".experts."):
        raise NotSupported(
            "EAGLE-3 with a mixture-of-experts body is not built; bodies: " + ", ".join(BODIES)
        )
    if has("mask_hidden"):
        raise NotSupported("P-EAGLE (mask_hidden: parallel drafting) is not built")
    if has("eh_proj") or flags.on("eh_proj_before_attn"):
        raise NotSupported("EAGLE-3 heads with eh_proj before the attention are not built")
    if flags.get("use_aux_hidden_state") is False:
        raise NotSupported(
            "EAGLE-3 on the last hidden state alone (use_aux_hidden_state=false) is not built"
        )
    if flags.get("next_layer_regular") is False:
        raise NotSupported(
            "EAGLE-3 layers that all take [embedding, hidden] (next_layer_regular=false) are not "
            "built"
        )
    later = [
        name
        for name in shapes
        if name.endswith("hidden_norm.weight") and not name.startswith("layers.0.")
    ]
    if later:
        raise NotSupported(
            f"{later[0]}: multi-layer heads that call the later layers' input norm hidden_norm "
            "are not built; "
            "expected input_layernorm there"
        )
    if "layers.0.hidden_norm.weight" not in shapes or "fc.weight" not in shapes:
        raise CheckpointError(
            "not an EAGLE-3 checkpoint: expected fc.weight and midlayer.hidden_norm.weight (or "
            f"layers.0.hidden_norm.weight), came {', '.join(sorted(shapes)[:4]) or 'no tensors'}, "
            "..."
        )
    if len(shapes["fc.weight"]) != 2:
        raise CheckpointError(f"fc.weight: expected 2 dimensions, came {list(shapes['fc.weight'])}")


def _body(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """The model type of the decoder layer, or else the body in the architecture's name."""
    model_type = fields.get("model_type")
    if model_type in BODIES:
        return str(model_type)
    architectures = [str(name) for name in raw.get("architectures") or ()]
    if fields.get("kv_lora_rank"):
        raise NotSupported(
            f"EAGLE-3 with an MLA body ({model_type}) is not built; bodies: {', '.join(BODIES)}"
        )
    if model_type in (None, "eagle3", "eagle", "llama_eagle3", "eagle3_llama"):
        named = [
            body
            for body in BODIES
            for name in architectures
            if f"{body}forcausallm" in name.lower()
        ]
        if named or not architectures:
            return named[0] if named else "llama"
    raise NotSupported(
        f"EAGLE-3 body {model_type!r} (architectures {architectures}) is not built; bodies: "
        f"{', '.join(BODIES)}"
    )


def body_config(body: str, fields: Mapping[str, Any]) -> Any:
    """The decoder layer's fields as transformers reads them, defaults of the body filled in.

    Raises: CheckpointError (incomplete or impossible), NotSupported.
    """
    missing = [key for key in REQUIRED_KEYS if fields.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json of the draft lacks {', '.join(missing)}")
    known = {key: fields[key] for key in BODY_KEYS if fields.get(key) is not None}
    known.setdefault("num_hidden_layers", 1)
    known.setdefault("num_key_value_heads", known["num_attention_heads"])
    for key in (*REQUIRED_KEYS, "num_hidden_layers", "num_key_value_heads", "head_dim"):
        if key in known:
            _positive(known[key], key)
    if body == "mistral":
        known.setdefault("sliding_window", None)
    try:
        layer = CONFIG_MAPPING[body](**known)
    except Exception as error:  # transformers validates with several error types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"config.json of the draft: transformers refuses it as {body!r} ({reason})"
        ) from error
    if getattr(layer, "use_sliding_window", False):
        raise NotSupported("a draft body with use_sliding_window=true is not built")
    if layer.num_attention_heads % (layer.num_key_value_heads or layer.num_attention_heads):
        raise CheckpointError(
            f"config.json of the draft: {layer.num_attention_heads} heads are no multiple of "
            f"{layer.num_key_value_heads} key-value heads"
        )
    return layer


def rope_parameters(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Rotary parameters of a `body_config`, as sorted items.  Raises: NotSupported."""
    parameters = dict(layer.rope_parameters)
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise NotSupported(
            f"draft rope_type {rope_type!r} is not built; built: {', '.join(ROPE_TYPES)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise NotSupported("draft rope with partial_rotary_factor is not built")
    return tuple(sorted(parameters.items()))


def _num_draft_tokens(raw: Mapping[str, Any]) -> int:
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return _positive(
        proposals[0].get("speculative_tokens") or DEFAULT_NUM_DRAFT_TOKENS, "speculative_tokens"
    )


def _positive(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"config.json of the draft: {key} must be a positive integer, came {value!r}"
        )
    return value


def _distinct(values: Any, key: str, error: type[Exception]) -> tuple[int, ...]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    if not is_list or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise error(f"{key}: expected a list of layer indices, came {values!r}")
    if len(set(values)) != len(values):
        raise error(f"{key}: the indices must be distinct, came {list(values)}")
    return tuple(sorted(values))
