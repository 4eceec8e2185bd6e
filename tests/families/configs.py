"""Tiny configs of any family of transformers, made by rules of field names.

Windows, chunks and selections are shorter than the prompts; options that models have off by default
(biases, soft caps, scales, other rotary tables) are on, so that one that is ignored shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

VOCAB = 131
NUM_LAYERS = 4
WINDOW = 8

# The first rule whose pattern matches a whole field name gives its value.  A value None means that
# the field is left to the config.
_RULES: tuple[tuple[str, Any], ...] = (
    # sizes
    (r"(?:unpadded_|.*_)?vocab_size(?:_per_layer_input)?", VOCAB),
    (r"ngram_vocab_size_base", 97),
    (r"(?:num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_blocks"
     r"|num_(?:decoder|encoder)_layers|attention_layers_count)", NUM_LAYERS),
    (r"(?:hidden_size|d_model|n_embd|attention_hidden_size|lru_width|embedding_dim"
     r"|output_embedding_size|word_embed_proj_dim|backbone_hidden_size|mamba_d_ssm)", 64),
    (r"(?:embedding_size|input_embedding_size)", 64),
    (r"(?:embed_dim|(?:out|projector|vision|text)_hidden_size|projection_dim)", 64),
    (r"depth|layers", NUM_LAYERS), (r"deepstack_visual_indexes", [0, 1]), (r"num_embeddings", 32),
    (r"hidden_size_per_layer_input|ple_embed_dim", 16),
    (r"(?:dense_|prefix_dense_|shared_|shared_expert_|shared_experts_|moe_|moe_shared_expert_"
     r"|expert_)?(?:intermediate_size|ffn_hidden_size)(?:_mlp)?", 96),
    (r"(?:ffn_dim|n_inner|ffn_hidden_size|emb_dim|dff|d_inner|(?:de|en)coder_ffn_dim"
     r"|feed_forward_size|dim_ff)", 96),
    (r"(?:num_attention_heads|n_heads?|num_heads|attention_heads|(?:de|en)coder_attention_heads"
     r"|num_(?:de|en)coder_attention_heads|swa_num_attention_heads)", 4),
    (r"(?:num_key_value_heads|num_kv_heads|swa_num_key_value_heads|num_query_groups)", 2),
    (r"(?:head_dim|swa_head_dim|kv_channels|attention_head_size|d_head|global_head_dim"
     r"|attention_head_dim|qk_head_dim|dim_head)", 16),
    (r"rotary_dim", 8),
    # latent attention and its indexer
    (r"q_lora_rank", 24), (r"kv_lora_rank", 20), (r"qk_rope_head_dim", 8),
    (r"qk_nope_head_dim", 16), (r"v_head_dim", 12), (r"o_lora_rank", 16), (r"o_groups", 2),
    (r"index(?:er)?_n_heads", 16), (r"index(?:er)?_head_dim", 16), (r"index_topk", 6),
    (r"index_topk_blocks", 3), (r"index_block_size", 4), (r"index_local_blocks", 1),
    (r"indexer_kv_heads", 1), (r"indexer_budget", 8), (r"indexer_compress_ratio", 4),
    # experts
    (r"(?:num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(?:num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts)", 2),
    (r"(?:n_shared_experts|num_shared_experts|moe_num_shared_experts)", 1),
    (r"(?:n_group|num_expert_group)", 2), (r"topk_group", 1), (r"zero_expert_num", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"moe_layer_end_index", NUM_LAYERS - 1), (r"moe_latent_size", None),
    (r"router_hidden_size", 16),
    # recurrence
    (r"(?:mamba_num_heads|mamba_n_heads|n_mamba_heads|linear_num_key_heads|linear_num_heads"
     r"|linear_num_value_heads)", 4),
    (r"(?:linear_(?:key_|value_)?head_dim|mamba_d_head|mamba_head_?dim)", 16),
    (r"(?:state_size|ssm_state_size|mamba_d_state)", 8),
    (r"(?:mamba_)?n_?groups|mamba_ngroups", 2), (r"(?:mamba_)?expand", 1),
    (r"(?:mamba_|attn_)?chunk_size(?:_lm_head)?", None), (r"mamba_dt_rank|time_step_rank", 4),
    # windows, chunks and lengths
    (r"(?:sliding_window(?:_size)?|attention_chunk_size|window_size|local_attention"
     r"|attention_window_size|keep_window_size)", WINDOW),
    (r"use_sliding_window", True), (r"max_window_layers", 2),
    (r"(?:max_position_embeddings|n_positions|max_seq_len|model_max_length|n_ctx"
     r"|max_target_positions|context_length)", 256),
    (r"_?(?:sliding_window_pattern|prefix_dense_sliding_window_pattern|no_rope_layer_interval"
     r"|global_attn_every_n_layers|full_attention_interval|layer_group_size)", 2),
    (r"attn_layer_period", 2), (r"attn_layer_offset", 1),
    (r"expert_layer_period|decoder_sparse_step|moe_layer_interval|interleave_moe_layer_step", 2),
    (r"num_kv_shared_layers", 0), (r"num_layers_per_stack|n_layers_per_attn_res_block", 2),
    (r"(?:floor_scale|log_scaling_n_floor)", 4), (r"rel_extent", 16), (r"d_rel", 8),
    # small parts
    (r"(?:.*_)?rank", 8), (r"hc_mult|hc_count|altup_num_inputs", 2), (r"hc_lowrank", 16),
    (r"heads_per_ngram", 2), (r"split_ngram_parts", 4), (r"make_ngram_vocab_size_.*", 8),
    (r"adapter_reduction_factor", 2), (r"num_codebooks", 2),
    # tokens
    (r"pad_token_id", 0), (r"bos_token_id|decoder_start_token_id", 1), (r"eos_token_id", 2),
    (r".*_token_(?:id|index)", 3), (r"suppress_tokens|begin_suppress_tokens", []),
    (r"(?:pad|unk|mask|bos|eos)_index", 0), (r"prompt_length", 4), (r"vocabulary_map", None),
    # what makes a decoder of an encoder
    (r"is_decoder", True), (r"add_cross_attention|is_encoder_decoder", False),
    (r"causal", True), (r"is_encoder", False),
    # options that are off
    (r"(?:attention_|mlp_|attention_out_|add_bias_|use_qkv_|lm_head_|conv_|mamba_conv_|use_conv_)"
     r"?bias(?:_linear)?|qkv_bias|use_bias", True),
    (r"(?:attn_logit|final_logit|mlp_gate|mlp_up|moe_router_logit)_soft_?capping", 5.0),
    (r"(?:logits_soft_cap|output_logit_soft_cap|gate_soft_cap)", 5.0),
    (r"(?:residual_multiplier|attention_in_multiplier|key_multiplier|attention_value_scale"
     r"|attention_out_multiplier|lm_head_multiplier|logit_scale)", 0.7),
    (r"(?:embedding_multiplier|scale_emb)", 1.5), (r"logits_scaling", 2.0),
    (r"(?:attention_multiplier)", 0.3), (r"query_pre_attn_scalar", 12),
    (r"(?:routed_scaling_factor|route_scale|router_scaling_factor|moe_routed_scaling_factor)", 1.5),
    (r"(?:use_qk_norm|qk_layernorm|mup_enabled|norm_topk_prob)", True), (r"clip_qkv", 2.0),
    (r"attn_temperature_tuning", True), (r"attn_scale|log_scaling_alpha", 0.3),
    (r".*dropout(?:_p|_prob)?|.*_pdrop|.*layerdrop|.*jitter_noise", 0.0),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), value) for pattern, value in _RULES)

# Fields that the rules get wrong in a family, and why.
_MIXED = ["conv", "full_attention"] * (NUM_LAYERS // 2)
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (NUM_LAYERS // 2)},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (NUM_LAYERS // 2),
        "index_n_heads": 2,
    },
    "longcat_flash": {"head_dim": 8},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "lfm2_moe": {"layer_types": _MIXED},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24},
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        }
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "emu3": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 3}},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"] * (NUM_LAYERS // 2),
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    },
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [96, 64]},
    "mistral4": {"qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 16},
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2"},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
        "per_layer_config": {},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "emu3_vqgan": {"base_channels": 32, "embed_dim": 4},
    "molmo2_adapter": {"vision_feature_layer": [3, 2]},
    "muse_spark_audio": {"hidden_sizes": [16, 16, 32, 64]},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32},
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
}

ROTARY = ("default", "yarn", "llama3", "linear")


class CannotBuild(Exception):
    """A config that no rule makes small and valid."""


def tiny_config(config_class: Any, *, rope_type: str = "default", **fixed: Any) -> Any:
    """A small config of the class; nested configs are small too.

    Args:
        rope_type: the rotary table, where the family has one.
        fixed: fields with values of their own.
    Raises: CannotBuild.
    """
    default = _default(config_class)
    fields = _small(config_class, default, rope_type)
    fields |= FAMILY_FIELDS.get(config_class.model_type, {}) | fixed
    # A field that a config refuses (a property, a check against another one) is left out.
    for _ in range(8):
        try:
            return config_class(**fields)
        except Exception as error:
            culprit = _named_in(str(error), [n for n in fields if not n.endswith("_config")])
            if culprit is None:
                raise CannotBuild(f"{type(error).__name__}: {error}") from error
            del fields[culprit]
    raise CannotBuild("more than eight fields are refused")


def _default(config_class: Any) -> Mapping[str, Any]:
    try:
        return config_class().to_dict()
    except Exception:
        return {
            name: getattr(config_class, name)
            for name in getattr(config_class, "__annotations__", {})
            if hasattr(config_class, name)
        }


def _small(config_class: Any, default: Mapping[str, Any], rope_type: str) -> dict[str, Any]:
    nested = dict(getattr(config_class, "sub_configs", {}) or {})
    num_layers = next(
        (default[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if default.get(n)), 0
    )
    fields: dict[str, Any] = {}
    for name, value in default.items():
        if name in nested:
            if isinstance(value, Mapping):
                fields[name] = _nested(nested[name], value, rope_type)
            continue
        if name == "rope_parameters" and isinstance(value, Mapping):
            fields[name] = _rope(value, rope_type, config_class.model_type in _WITH_AXES)
            continue
        rule = next((new for pattern, new in _COMPILED if pattern.fullmatch(name)), None)
        if isinstance(value, (list, tuple)) and num_layers and len(value) == num_layers:
            fields[name] = _few(list(value) if rule is None else [rule])
            continue
        if (rule is not None and value is not None) or (rule is not None and name in ALSO_NONE):
            fields[name] = rule
    if "kv_lora_rank" in fields:  # heads share a latent, not keys
        fields["num_key_value_heads"] = fields.get("num_attention_heads", 4)
        fields.pop("head_dim", None)
        fields.pop("qk_head_dim", None)
    if "sliding_window" in fields and set(fields.get("layer_types") or ()) == {"full_attention"}:
        fields["layer_types"] = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    return fields


# Fields whose default None stands for a number that follows from large ones.
ALSO_NONE = frozenset(
    {"head_dim", "sliding_window", "n_inner", "pad_token_id", "bos_token_id", "eos_token_id",
     "num_key_value_heads", "intermediate_size", "indexer_budget", "indexer_compress_ratio",
     "indexer_head_dim", "indexer_kv_heads", "indexer_n_heads"}
)  # fmt: skip


def _nested(config_class: Any, value: Mapping[str, Any], rope_type: str) -> Any:
    if not getattr(config_class, "model_type", None):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if value.get("model_type") not in CONFIG_MAPPING:
            return dict(value)
        config_class = CONFIG_MAPPING[value["model_type"]]
    return tiny_config(config_class, rope_type=rope_type).to_dict()


_WITH_AXES = frozenset(
    {"qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm4v_moe_text",
     "glm_ocr_text", "paddleocr_vl_text", "ernie4_5_vl_moe_text", "hunyuan_vl_text"}
)  # fmt: skip
_KEPT_OF_ROPE = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def _few(values: list[Any]) -> list[Any]:
    """Four of a list that has one for each layer: each kind once, in the order they come."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    few = kinds[:NUM_LAYERS]
    while len(few) < NUM_LAYERS:
        few.append(kinds[len(few) % len(kinds)])
    return few


def _rope(value: Mapping[str, Any], rope_type: str, has_axes: bool = False) -> dict[str, Any]:
    """Rotary parameters with a table of the wanted type; one a kind of layer stay so.

    Args:
        has_axes: true for a model with rotary positions of three axes, which its default does not
            say.
    """
    by_kind = [one for one in value.values() if isinstance(one, Mapping)]
    if by_kind:
        return {k: one and _rope(one, rope_type) for k, one in value.items()}
    if not value:
        return {}
    kept = {k: v for k, v in value.items() if k in _KEPT_OF_ROPE}
    kept.setdefault("rope_theta", 1e4)
    if "mrope_section" in kept or has_axes:  # half a head's pairs, among time, height and width
        pairs = int(8 * kept.get("partial_rotary_factor", 1.0))
        each = -(-pairs * 3 // 8)
        kept["mrope_section"] = [each, each, pairs - 2 * each]
    extra: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.0},
        "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
        "llama3": {
            "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }  # fmt: skip
    given = value.get("rope_type", "default")
    if given in extra and given != "default" and rope_type in ("default", given):
        return {**value, **extra[given]}  # with what only this family has
    if given not in ("default", None) and given not in extra:
        return dict(value)  # a table that only this family has
    return {**kept, "rope_type": rope_type, **extra[rope_type]}


def _named_in(message: str, fields: Iterable[str]) -> str | None:
    """The field that an error names, the longest name first."""
    for name in sorted(fields, key=len, reverse=True):
        if re.search(rf"\b{re.escape(name)}\b", message):
            return name
    return None
