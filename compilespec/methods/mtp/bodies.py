"""The decoder layers of transformers that a module's block may be, and what checkpoints call them.

A body is the model type of config.json.  What a family's block has beside a plain layer (several
layers a module, none of the target's hyper-connections) belongs to its entry here.

Source: vLLM's and SGLang's loaders of these modules; PaddlePaddle's own for ERNIE.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compilespec.errors import NotSupported
from compilespec.methods.decoder_body import ROPE_TYPES


@dataclass(frozen=True, kw_only=True)
class Body:
    """A family's decoder layer."""

    package: str
    """Folder of transformers' models."""
    prefix: str
    """Beginning of its classes' names."""
    layer: str = "DecoderLayer"
    """End of the name of the layer's class."""
    eps: str = "rms_norm_eps"
    """The field of the config for the norms."""
    has_rope: bool = True
    """False where attention knows no positions."""
    is_plain: bool = False
    """True for blocks without the hyper-connections of the target's layers."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of published names in a block, and what transformers has in their place."""
    dropped: str = r"$^"
    """Pattern of published names that nothing reads."""


BODIES: dict[str, Body] = {
    "llama": Body(package="llama", prefix="Llama"),
    "mistral": Body(package="mistral", prefix="Mistral"),
    "qwen2": Body(package="qwen2", prefix="Qwen2"),
    "mimo": Body(package="qwen2", prefix="Qwen2"),
    "qwen3": Body(package="qwen3", prefix="Qwen3"),
    "deepseek_v3": Body(package="deepseek_v3", prefix="DeepseekV3"),
    "deepseek_v32": Body(package="deepseek_v32", prefix="DeepseekV32"),
    "glm4_moe": Body(package="glm4_moe", prefix="Glm4Moe"),
    "glm_moe_dsa": Body(package="glm_moe_dsa", prefix="GlmMoeDsa"),
    "qwen3_next": Body(package="qwen3_next", prefix="Qwen3Next"),
    "qwen3_5_text": Body(package="qwen3_5", prefix="Qwen3_5"),
    "qwen3_5_moe_text": Body(package="qwen3_5_moe", prefix="Qwen3_5Moe"),
    "step3p5": Body(package="step3p7", prefix="Step3p7"),
    "hy_v3": Body(
        package="hy_v3", prefix="HYV3", dropped=r"shared_head\.|embed_tokens\.",
        renamed=(
            (r"^mlp\.router\.gate\.", "mlp.gate."),
            (r"^mlp\.expert_bias$", "mlp.e_score_correction_bias"),
            (r"^mlp\.shared_mlp\.", "mlp.shared_experts."),
        ),
    ),
    "hy_v4": Body(
        package="hy_v4", prefix="HYV4", is_plain=True,
        renamed=(
            (r"^self_attn\.learnable_sink_param$", "self_attn.sinks"),
            (r"^self_attn\.linear_gate\.", "self_attn.gate_proj."),
        ),
    ),
    "mimo_v2_flash": Body(
        package="mimo_v2_flash", prefix="MiMoV2Flash",
        renamed=(
            (r"^self_attn\.attention_sink_bias$", "self_attn.sinks"),
            (r"^pre_mlp_layernorm\.", "post_attention_layernorm."),
        ),
    ),
    "nemotron_h": Body(
        package="nemotron_h", prefix="NemotronH", layer="Block", eps="layer_norm_epsilon",
        has_rope=False,
    ),
    "ernie4_5_moe": Body(
        package="ernie4_5_moe", prefix="Ernie4_5_Moe",
        renamed=((r"^mlp\.moe_statics\.", "mlp.gate.moe_statics."),),
    ),
    "bailing_hybrid": Body(
        package="bailing_hybrid", prefix="BailingHybrid",
        renamed=(
            (r"^attention\.dense\.", "self_attn.o_proj."),
            (r"^attention\.", "self_attn."),
            (r"^mlp\.gate\.expert_bias$", "mlp.gate.e_score_correction_bias"),
        ),
    ),
    "mellum": Body(package="mellum", prefix="Mellum"),
}  # fmt: skip

# Families whose published modules are known and not built.
REFUSED = {
    "deepseek_v4": "their keys are compressed",
    "qwen4_exp": "they read the target's residual streams before these are mixed",
    "qwen4_exp_text": "they read the target's residual streams before these are mixed",
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


def check_body(body: str) -> None:
    """Raises: NotSupported for a model type whose modules are not built."""
    if body not in BODIES:
        why = f", because {REFUSED[body]}" if body in REFUSED else ""
        raise NotSupported(
            f"MTP modules with a decoder layer of model_type {body!r} are not built{why}; known: "
            f"{', '.join(BODIES)}"
        )


def name_in_block(body: str, rest: str) -> str:
    """transformers' name of a block's tensor."""
    for pattern, new in BODIES[body].renamed if body in BODIES else ():
        rest = re.sub(pattern, new, rest)
    return rest


def body_class(body: str, kind: str) -> type[nn.Module]:
    """transformers' class of a body: its layer, "RMSNorm" or "RotaryEmbedding"."""
    entry = BODIES[body]
    module = _module(entry, "modeling")
    of_text = getattr(module, f"{entry.prefix}Text{kind}", None)  # beside one for images
    found: type[nn.Module] = of_text or getattr(module, entry.prefix + kind)
    return found


def _module(entry: Body, kind: str) -> Any:
    return importlib.import_module(f"transformers.models.{entry.package}.{kind}_{entry.package}")


def make_block(body: str, config: Any, index: int) -> nn.Module:
    """The block of module `index`."""
    layer = body_class(body, BODIES[body].layer)
    if body == "nemotron_h":
        count = len(config.mtp_layers_block_type)
        return Stack([layer(config, index * count + number) for number in range(count)])
    block = layer(config, index)
    return PlainBlock(block) if BODIES[body].is_plain else block


class Stack(nn.Module):
    """Layers one after the other, each of which mixes tokens or the values of one."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **options)
        return hidden


class PlainBlock(nn.Module):
    """The parts of a decoder layer, each added to one residual stream."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        mixed: Tensor = self.self_attn(hidden_states=self.input_layernorm(hidden), **options)[0]
        hidden = hidden + mixed
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def block_config(
    body: str, raw: Mapping[str, Any], num_modules: int, *, dense: Sequence[int] = ()
) -> Any:
    """transformers' config for the layers of `num_modules` modules, numbered from 0.

    Args:
        dense: layers without experts, where a body of experts may have such.
    Raises:
        NotSupported: a rope type whose frequencies depend on the positions.
    """
    entry = BODIES[body]
    module = _module(entry, "configuration")
    config_class = getattr(module, f"{entry.prefix}TextConfig", None) or getattr(
        module, f"{entry.prefix}Config"
    )
    fields = {key: _number(value) for key, value in raw.items() if key not in NOT_OF_THE_BLOCK}
    config = config_class(**fields)
    kinds = _layer_types(body, config, num_modules)
    sparse = ["dense" if index in dense else "sparse" for index in range(num_modules)]
    if body == "step3p5":
        sparse = config.mtp_mlp_layer_types or ["dense"] * num_modules
        _set_step(config, raw, kinds)
    config.num_hidden_layers = num_modules
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the modules' MLPs are experts
    if hasattr(config, "moe_layer_start_index"):
        config.moe_layer_start_index, config.moe_layer_end_index = len(dense), num_modules
        config.moe_layer_interval = 1
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = sparse
    if hasattr(config, "indexer_types"):
        config.indexer_types = ["full"] * num_modules  # none is before a module to share with
    if hasattr(config, "decoder_sparse_step"):
        config.decoder_sparse_step, config.mlp_only_layers = 1, list(dense)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = kinds
    if entry.has_rope:
        _check_rope(config.rope_parameters)
    return config


def _number(value: Any) -> Any:
    """The value of a field; infinity as transformers writes it, inside lists too."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    is_tagged = isinstance(value, Mapping) and list(value) == ["__float__"]
    return float(value["__float__"]) if is_tagged else value


def _layer_types(body: str, config: Any, num_modules: int) -> list[str]:
    """The kinds of the modules' layers."""
    if body == "nemotron_h":
        kinds = list(config.mtp_layers_block_type)
        if "linear_attention" in kinds:
            raise NotSupported(
                f"MTP modules of nemotron_h with layers {', '.join(kinds)} are not built: a "
                "drafter's recurrent layers could not be rewound"
            )
        return kinds * num_modules
    kind = "sliding_attention" if body in ("mimo_v2_flash", "mellum") else "full_attention"
    kind = "indexed_attention" if hasattr(config, "index_topk") else kind
    return getattr(config, "mtp_layer_types", None) or [kind] * num_modules


def _set_step(config: Any, raw: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Set the fields that Step-3.5 gives each layer."""
    config.per_layer_config = {
        index: {"num_attention_heads": config.num_sliding_attention_heads}
        for index, kind in enumerate(kinds)
        if kind == "sliding_attention"
    }
    first = config.num_hidden_layers
    for key in ("swiglu_limits", "swiglu_limits_shared"):  # HF keeps the target's only
        limits = raw.get(key) or []
        setattr(config, key, limits[first : first + len(kinds)] or None)


def _check_rope(parameters: Mapping[str, Any]) -> None:
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for one in nested or [parameters]:
        if one["rope_type"] not in ROPE_TYPES:
            raise NotSupported(
                f"rope type {one['rope_type']!r} of the MTP modules is not built; known: "
                f"{', '.join(ROPE_TYPES)}"
            )
