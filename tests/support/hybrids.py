"""Tiny random targets with recurrent layers, of all families whose functions are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
# Above it, the models' own decoding, which has no lower limit, and their prefill agree.
_NO_LIMIT = 1e-9
_LINEAR_FIRST = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]


def hybrid_configs(common: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """By family, what makes a config of four layers; `common` has the sizes of all families."""

    sizes = {**common, "num_hidden_layers": 4, "tie_word_embeddings": False}

    def config(kind: str, **changes: Any) -> Any:
        return getattr(transformers, kind)(**{**sizes, **changes})

    return {
        "qwen3_next": lambda: config(
            "Qwen3NextConfig", layer_types=_LINEAR_FIRST, **_DELTA, **_EXPERTS
        ),
        "qwen3_5": lambda: config(
            "Qwen3_5TextConfig", layer_types=_LINEAR_FIRST, **_DELTA
        ),
        "qwen3_5_moe": lambda: config(
            "Qwen3_5MoeTextConfig", layer_types=_LINEAR_FIRST, **_DELTA, **_EXPERTS
        ),
        "olmo_hybrid": lambda: config(
            "OlmoHybridConfig", layer_types=_LINEAR_FIRST, **_DELTA
        ),
        "kimi_linear": lambda: config(
            "KimiLinearConfig", layer_types=_LINEAR_FIRST,
            linear_num_heads=4, linear_head_dim=12, linear_conv_kernel_dim=4,
            kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=12, qk_rope_head_dim=8,
            v_head_dim=12,
            num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
            num_attention_heads=4, num_key_value_heads=4,
        ),
        "nemotron_h": lambda: config(
            "NemotronHConfig",
            layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
            head_dim=12, mamba_num_heads=8, mamba_head_dim=12, n_groups=2, ssm_state_size=10,
            conv_kernel=4, chunk_size=8, expand=2, time_step_min=_NO_LIMIT,
        ),
        "granitemoehybrid": lambda: config(
            "GraniteMoeHybridConfig", layer_types=_LINEAR_FIRST,
            num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32, **_MAMBA
        ),
        "bamba": lambda: config(
            "BambaConfig", attn_layer_indices=[1], **_MAMBA
        ),
        "falcon_h1": lambda: config("FalconH1Config", head_dim=12, mamba_d_ssm=96, **_MAMBA),
        "lfm2": lambda: config(
            "Lfm2Config", layer_types=["conv", "full_attention", "conv", "conv"],
            conv_L_cache=3, block_ff_dim=80, block_multiple_of=8,
        ),
        "lfm2_moe": lambda: config(
            "Lfm2MoeConfig", layer_types=["conv", "full_attention", "conv", "conv"],
            conv_L_cache=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            num_dense_layers=1,
        ),
        "zamba2": lambda: config(
            "Zamba2Config", layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            mamba_d_state=10, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=2, n_mamba_heads=8,
            mamba_headdim=12, num_mem_blocks=1, chunk_size=8, use_mamba_kernels=False,
            attention_head_dim=24, time_step_min=_NO_LIMIT,
        ),
        "jamba": lambda: config(
            "JambaConfig", attn_layer_period=4, attn_layer_offset=1,
            expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2,
            mamba_d_state=10, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=6,
            use_mamba_kernels=False,
        ),
    }  # fmt: skip


ROUTED = ("qwen3_next", "qwen3_5_moe", "kimi_linear", "granitemoehybrid", "jamba", "lfm2_moe")
