"""The decoder layer of a head: which of transformers' layers it is, and its sizes.

The config.json of an EAGLE-1 or EAGLE-3 head names them as an ordinary model's does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import CONFIG_MAPPING

from compilespec.errors import CheckpointError, NotSupported

BODIES = ("llama", "qwen2", "qwen3", "mistral")  # decoder layers the drafter module knows
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # their frequencies depend on the config alone

# The body's fields that are passed to transformers, which knows the defaults of each model type.
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
SLIDING = "sliding_attention"  # a layer's type
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types")
REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


class BodyConfig(Protocol):
    """Sizes of a decoder layer that its MLP and its rotary positions read."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope(self) -> tuple[tuple[str, Any], ...]: ...
    @property
    def own_embedding(self) -> bool: ...
    @property
    def own_lm_head(self) -> bool: ...


class LayerConfig(BodyConfig, Protocol):
    """Sizes of a whole decoder layer."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def out_bias(self) -> bool: ...


def named_body(architectures: Sequence[str]) -> str | None:
    """The body in an architecture's name, as in "LlamaForCausalLMEagle3"; None if there is none."""
    for body in BODIES:
        if any(f"{body}forcausallm" in name.lower() for name in architectures):
            return body
    return None


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
            positive(known[key], key)
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


def body_sizes(body: str, layer: Any) -> dict[str, Any]:
    """The fields of an `Eagle3Config` that follow from a `body_config`.  Raises: NotSupported."""
    num_heads = layer.num_attention_heads
    return {
        "body": body,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_layers": layer.num_hidden_layers,
        "num_heads": num_heads,
        "num_kv_heads": layer.num_key_value_heads or num_heads,
        "head_dim": getattr(layer, "head_dim", None) or layer.hidden_size // num_heads,
        "vocab_size": layer.vocab_size,
        "rms_norm_eps": layer.rms_norm_eps,
        "hidden_act": layer.hidden_act,
        "max_position_embeddings": layer.max_position_embeddings,
        "rope": rope_parameters(layer),
        "window": (layer.sliding_window or 0) if body == "mistral" else 0,
    }


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


def layer_windows(
    fields: Mapping[str, Any], num_layers: int, default: Sequence[str] | None = None
) -> tuple[int, ...]:
    """The window of each layer that `layer_types` (or `default`) says has one, 0 of the others;
    empty if there are no types.  Raises: CheckpointError.
    """
    types = fields.get("layer_types") or default
    if types is None:
        return ()
    if len(types) != num_layers:
        raise CheckpointError(
            f"config.json of the draft: layer_types names {len(types)} layers, num_hidden_layers "
            f"is {num_layers}"
        )
    if SLIDING not in types:
        return (0,) * num_layers
    size = positive(fields.get("sliding_window"), "sliding_window")
    return tuple(size if one == SLIDING else 0 for one in types)


def positive(value: Any, key: str) -> int:
    """The value, a positive integer.  Raises: CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"config.json of the draft: {key} must be a positive integer, got {value!r}"
        )
    return value
