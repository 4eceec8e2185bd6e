"""The EAGLE-3 drafter module: true features in, draft tokens (target ids) out.

Its state_dict uses speculators' names: fc, layers.{i}, norm, lm_head, embed_tokens, d2t,
input_norm, fc_norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import compilespec.ops.attention  # noqa: F401  (registers the operator that Attention calls)
from compilespec.methods.decoder_body import BodyConfig
from compilespec.methods.eagle3.config import Eagle3Config
from compilespec.methods.recycled import RecycledDrafter


class Eagle3Drafter(RecycledDrafter):
    """One EAGLE-3 head.

    Row t takes the hidden state of position t and the embedding of the token at t+1, has position
    id t, and proposes the token at t+2.  The hidden state is `combine` of the target's aux hidden
    states for true rows, and the recycled output of the row before for drafted ones.

    Source: Li et al. 2025 (EAGLE-3); the options are those of speculators 0.9 and vLLM.
    """

    d2t: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.num_draft_tokens = config.num_draft_tokens
        self.aux_layers = config.aux_layers
        num_aux, width, eps = len(config.aux_layers), config.target_hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(num_aux * width, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(width, eps) for _ in range(num_aux)) if config.fc_norm else None
        )
        self.fc = nn.Linear(num_aux * width, config.hidden_size, bias=config.fc_bias)
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(
            [
                FusedLayer(config),
                *(Layer(config, config.hidden_size) for _ in range(config.num_layers - 1)),
            ]
        )
        for layer, window in zip(self.layers, config.windows, strict=False):
            layer.self_attn.window = window  # type: ignore[union-attr]
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = Weight(config.draft_vocab_size, config.hidden_size)
        self.register_buffer(
            "d2t",
            torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.has_d2t else None,
        )

    def combine(self, aux: Tensor) -> Tensor:
        """Turn the aux hidden states [B, S, A*D], concatenated in layer order, into hidden_BSD."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        hidden_BSD: Tensor = self.fc(aux)
        return hidden_BSD

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the layers over rows [B, S].

        Args:
            input_ids: int32 or int64 target ids, row t the token at t+1; negative ids (padding)
                count as 0.
            position_ids: position of the hidden state, t for row t.
            hidden: hidden_BSD, from `combine` or recycled.
        Returns:
            head_input_BSD for `propose`, and recycled_BSD, the hidden state of the next row.
        """
        embed_BSD = functional.embedding(input_ids.clamp_min(0), self.embed_tokens.weight)
        cos, sin = self.rope(position_ids, hidden.dtype)
        hidden = self.layers[0](embed_BSD, hidden, cos, sin)
        for layer in self.layers[1:]:
            hidden = layer(hidden, cos, sin)
        head_input_BSD = self.norm(hidden)
        return head_input_BSD, head_input_BSD if self.config.norm_output else hidden

    def logits(self, head_input: Tensor) -> Tensor:
        """Draft logits [..., Vd] over the DRAFT vocabulary, in the drafter's dtype."""
        return functional.linear(head_input, self.lm_head.weight)

    @property
    def draft_ids(self) -> Tensor | None:
        """The target id of each draft id, int64; None where they are the same."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def propose(self, head_input: Tensor) -> Tensor:
        """Greedy draft tokens of rows [..., D]: int32 target ids."""
        draft_ids = self.logits(head_input).argmax(dim=-1)
        target_ids = draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
        return target_ids.to(torch.int32)

    def describe(self) -> str:
        """The resolved spec on one line."""
        return self.config.describe()


class FusedLayer(nn.Module):
    """First layer: attention over [embedding, hidden], so that q, k and v take twice the width."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(config, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(config)

    def forward(self, embed_BSD: Tensor, hidden_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed_BSD = self.hidden_norm(hidden_BSD)
        residual_BSD = normed_BSD if self.norm_before_residual else hidden_BSD
        fused = torch.cat((self.input_layernorm(embed_BSD), normed_BSD), dim=-1)
        hidden_BSD = residual_BSD + self.self_attn(fused, cos, sin)
        output_BSD: Tensor = hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))
        return output_BSD


class Layer(nn.Module):
    """An ordinary pre-norm decoder layer: the second and later ones."""

    def __init__(self, config: Eagle3Config, input_size: int) -> None:
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

    def __init__(self, config: Eagle3Config, input_size: int) -> None:
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


class Weight(nn.Module):
    """A matrix that may be the target's own: a shared parameter stays that parameter, a plain
    tensor becomes a buffer.
    """

    weight: Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def share(self, tensor: Tensor) -> None:
        """Hold `tensor` itself, not a copy."""
        del self.weight
        if isinstance(tensor, nn.Parameter):
            self.weight = tensor
        else:
            self.register_buffer("weight", tensor)


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
