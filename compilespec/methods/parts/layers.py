"""Parts of decoder layers that drafters share: attention, MLP, norm, rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import compilespec.ops.attention  # noqa: F401  (registers the operator that Attention calls)
from compilespec.methods.decoder_body import BodyConfig, LayerConfig


class Layer(nn.Module):
    """An ordinary pre-norm decoder layer: the second and later ones."""

    def __init__(self, config: LayerConfig, input_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, input_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), cos, sin)
        output_BSD: Tensor = hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))
        return output_BSD


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, through the project's attention marker."""

    def __init__(self, config: LayerConfig, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.scale = config.head_dim**-0.5
        self.window = config.window
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, fused: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, rows, _ = fused.shape
        query = self.q_proj(fused).view(batch, rows, self.num_heads, self.head_dim)
        key = self.k_proj(fused).view(batch, rows, self.num_kv_heads, self.head_dim)
        value = self.v_proj(fused).view(batch, rows, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        heads = torch.ops.compilespec.attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self.scale,
            self.window,
            0.0,
            None,
        )
        output_BSD: Tensor = self.o_proj(heads.reshape(batch, rows, self.num_heads * self.head_dim))
        return output_BSD


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        output_BSD: Tensor = self.down_proj(
            self.act(self.gate_proj(hidden_BSD)) * self.up_proj(hidden_BSD)
        )
        return output_BSD


class RMSNorm(nn.Module):
    """y * w, computed in float32 or wider and rounded before the weight, as Llama does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rope(nn.Module):
    """Rotary angles of the draft's own config; casting the module leaves them float32."""

    inv_freq: Tensor

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        with torch.device("cpu"):  # real values even when the module is built on the meta device
            inv_freq, self.scaling = rope_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, 1, H], one set for all heads."""
        angles = position_ids[..., None].to(torch.float32) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = exact.to(self.inv_freq.device)
        return self


def rope_frequencies(config: BodyConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (float32 [H/2]) and the factor on cos and sin, as transformers."""
    parameters: dict[str, Any] = dict(config.rope)
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    like = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](like, torch.device("cpu"))
    return inv_freq.to(torch.float32), float(scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to [B, S, N, H], halves paired (not interleaved)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
