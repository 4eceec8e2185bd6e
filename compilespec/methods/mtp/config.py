"""Every published layout of MTP modules, normalised into one `MtpConfig`.

The layout is recognised by content: `speculators_model_type`, then the names of the tensors.  What
neither config.json nor the tensors say (order of the projection's inputs, which hidden state is
read and recycled) belongs to the layout, and the block is the target's own decoder layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.decoder_body import ROPE_TYPES
from compilespec.methods.mtp.layout import Layout, layout_of, module_names

Hidden = Literal["post_norm", "pre_norm"]

# Decoder layers of transformers that a module's block may be: model type -> package, class prefix.
BODIES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "Llama"),
    "mistral": ("mistral", "Mistral"),
    "qwen2": ("qwen2", "Qwen2"),
    "mimo": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32"),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsa"),
    "glm4_moe": ("glm4_moe", "Glm4Moe"),
    "qwen3_next": ("qwen3_next", "Qwen3Next"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5Moe"),
    "step3p5": ("step3p7", "Step3p7"),
}

# Keys of config.json that do not describe the block, or that transformers would act on.
NOT_OF_THE_BLOCK = (
    "model_type",
    "architectures",
    "auto_map",
    "quantization_config",
    "torch_dtype",
    "dtype",
    "transformers_version",
)

# Keys of config.json that count the modules.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")

_EMBEDDING = "embed_tokens.weight"
_DENSE = "block.mlp.gate_proj.weight"  # experts have their own router and matrices


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """The MTP modules of one checkpoint, in any layout."""

    layout: Layout
    """Naming of the tensors, which also implies the module's variant."""
    body: str
    """Model type of the decoder layer: one of `BODIES`."""
    block: Any = field(repr=False)
    """transformers config of the decoder layers, its per-layer lists those of the modules."""
    num_modules: int
    """Modules in the checkpoint."""
    hidden_first: bool = False
    """The projection takes [hidden ; embedding] instead of [embedding ; hidden]."""
    hidden: Hidden = "post_norm"
    """Hidden states that are read from the target and recycled: after or before the last norm."""
    pos0_mask: bool = False
    """The embedding is zero in the row of position 0."""
    num_draft_tokens: int
    """K that the checkpoint suggests."""

    @property
    def hidden_size(self) -> int:
        """Width of the modules, which is the target's."""
        return int(self.block.hidden_size)

    @property
    def chooses_keys(self) -> bool:
        """True where the block has an indexer, which chooses the keys that a token sees."""
        return hasattr(self.block, "index_topk")

    @property
    def vocab_size(self) -> int:
        """Rows of embedding and head."""
        return int(self.block.vocab_size)

    def describe(self) -> str:
        """The resolved spec on one line."""
        order = "[hidden ; embedding]" if self.hidden_first else "[embedding ; hidden]"
        mask = ", position 0 masked" if self.pos0_mask else ""
        return (
            f"mtp {self.layout} x{self.num_modules}, block {self.body}, hidden {self.hidden_size}, "
            f"vocab {self.vocab_size}, {order}, {self.hidden} hidden states{mask}, K "
            f"{self.num_draft_tokens}"
        )


def normalise(raw: Mapping[str, Any], names: Iterable[str], *, pos0_mask: bool) -> MtpConfig:
    """Read config.json and the tensors' names into one `MtpConfig`.

    Raises:
        CheckpointError: no modules, or not as many as the config says.
        NotSupported: a body or rope type that is not built; the message names it.
    """
    modules = module_names(raw, names)
    if not modules:
        raise CheckpointError(
            "the checkpoint holds no MTP modules; expected tensors such as "
            "model.layers.N.eh_proj.weight, model.mtp_layers.0.* or mtp.fc.weight"
        )
    layout = layout_of(raw, modules)
    new_names = set(modules.values())
    found = 1 + max(int(new.split(".")[1]) for new in new_names)
    inner = raw.get("transformer_layer_config" if layout == "speculators" else "text_config", raw)
    said = next((inner[key] for key in _COUNTS if inner.get(key)), None)
    if said is not None and int(said) != found and layout != "speculators":
        raise CheckpointError(
            f"config.json says {said} MTP modules, the tensors are those of {found}; copy the "
            "checkpoint again"
        )
    body = str(inner.get("model_type"))
    if body not in BODIES:
        raise NotSupported(
            f"MTP modules with a decoder layer of model_type {body!r} are not built; known: "
            f"{', '.join(BODIES)}"
        )
    if inner.get("mtp_use_dedicated_embeddings") and f"steps.0.{_EMBEDDING}" not in new_names:
        raise CheckpointError(
            "config.json says mtp_use_dedicated_embeddings, expected mtp.embed_tokens.weight among "
            "the tensors; copy the checkpoint again"
        )
    dense = [index for index in range(found) if f"steps.{index}.{_DENSE}" in new_names]
    return MtpConfig(
        layout=layout,
        body=body,
        block=block_config(body, inner, found, dense=dense),
        num_modules=found,
        hidden_first=layout == "mimo",
        hidden="pre_norm" if layout == "step" else "post_norm",
        pos0_mask=pos0_mask,
        num_draft_tokens=_suggested(raw) or found,
    )


def body_class(body: str, kind: str) -> type[nn.Module]:
    """transformers' class of a body: "DecoderLayer", "RMSNorm" or "RotaryEmbedding"."""
    package, prefix = BODIES[body]
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    of_text = getattr(module, f"{prefix}Text{kind}", None)  # beside one for images
    found: type[nn.Module] = of_text or getattr(module, prefix + kind)
    return found


def block_config(
    body: str, raw: Mapping[str, Any], num_modules: int, *, dense: Sequence[int] = ()
) -> Any:
    """transformers' config for `num_modules` decoder layers, numbered from 0.

    Args:
        dense: layers without experts, where a body of experts may have such.
    Raises:
        NotSupported: a rope type whose frequencies depend on the positions.
    """
    package, prefix = BODIES[body]
    module = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    config_class = getattr(module, f"{prefix}TextConfig", None) or getattr(
        module, f"{prefix}Config"
    )
    fields = {key: value for key, value in raw.items() if key not in NOT_OF_THE_BLOCK}
    config = config_class(**fields)
    kind = "indexed_attention" if hasattr(config, "index_topk") else "full_attention"
    num_layers, kinds = config.num_hidden_layers, [kind] * num_modules
    if body == "step3p5":
        kinds = config.mtp_layer_types or kinds
        config.mlp_layer_types = config.mtp_mlp_layer_types or ["dense"] * num_modules
        config.per_layer_config = {
            index: {"num_attention_heads": config.num_sliding_attention_heads}
            for index, kind in enumerate(kinds)
            if kind == "sliding_attention"
        }
        for key in ("swiglu_limits", "swiglu_limits_shared"):  # HF keeps the target's only
            limits = raw.get(key) or []
            setattr(config, key, limits[num_layers : num_layers + num_modules] or None)
    config.num_hidden_layers = num_modules
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the modules' MLPs are experts
    if getattr(config, "mlp_layer_types", None) is not None and body != "step3p5":
        config.mlp_layer_types = [
            "dense" if index in dense else "sparse" for index in range(num_modules)
        ]
    if hasattr(config, "indexer_types"):
        config.indexer_types = ["full"] * num_modules  # none is before a module to share with
    if hasattr(config, "decoder_sparse_step"):
        config.decoder_sparse_step, config.mlp_only_layers = 1, list(dense)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = kinds
    _check_rope(config.rope_parameters)
    return config


def _check_rope(parameters: Mapping[str, Any]) -> None:
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for one in nested or [parameters]:
        if one["rope_type"] not in ROPE_TYPES:
            raise NotSupported(
                f"rope type {one['rope_type']!r} of the MTP modules is not built; known: "
                f"{', '.join(ROPE_TYPES)}"
            )


def _suggested(raw: Mapping[str, Any]) -> int:
    """K of a speculators config, 0 elsewhere."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or []
    return int(methods[0].get("speculative_tokens") or 0) if methods else 0
