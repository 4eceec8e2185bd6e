"""The EAGLE-3 drafter module: true features in, draft tokens (target ids) out.

Its state_dict uses speculators' names: fc, layers.{i}, norm, lm_head, embed_tokens, d2t,
input_norm, fc_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import compilespec.ops.attention  # noqa: F401  (registers the operator that Attention calls)
from compilespec.methods.eagle3.config import Eagle3Config
from compilespec.methods.parts.d2t import DraftHead
from compilespec.methods.parts.layers import MLP, Attention, Layer, RMSNorm, Rope
from compilespec.methods.parts.weights import Weight
from compilespec.methods.recycled import RecycledDrafter


class Eagle3Drafter(DraftHead, RecycledDrafter):
    """One EAGLE-3 head.

    Row t takes the hidden state of position t and the embedding of the token at t+1, has position
    id t, and proposes the token at t+2.  The hidden state is `combine` of the target's aux hidden
    states for true rows, and the recycled output of the row before for drafted ones.

    Source: Li et al. 2025 (EAGLE-3); the options are those of speculators 0.9 and vLLM.
    """

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
        self.add_head(config)

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
