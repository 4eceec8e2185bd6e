"""The EAGLE-1 drafter module.  Its state_dict uses the authors' names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from compilespec.methods.eagle.config import EagleConfig
from compilespec.methods.parts.layers import MLP, Attention, Layer, RMSNorm, Rope
from compilespec.methods.parts.weights import Weight
from compilespec.methods.recycled import RecycledDrafter


class EagleDrafter(RecycledDrafter):
    """One EAGLE-1 head.

    Row t takes the target's last hidden state of position t (after the final norm) and the
    embedding of the token at t+1, has position id t, and proposes the token at t+2 through the
    target's own head.  Its output is the hidden state of the next row and the input of the head.

    Source: Li et al. 2024 (EAGLE, EAGLE-2), chain drafting.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.num_draft_tokens = config.num_draft_tokens
        self.aux_layers = config.aux_layers
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.embed_tokens = Weight(config.vocab_size, width)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(
            [FirstLayer(config), *(Layer(config, width) for _ in range(config.num_layers - 1))]
        )
        self.lm_head = Weight(config.vocab_size, width)

    def combine(self, aux: Tensor) -> Tensor:
        """Return the target's last hidden state unchanged."""
        return aux

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
            hidden_BSD twice: as the input of `propose`, and as the hidden state of the next row.
        """
        embed_BSD = functional.embedding(input_ids.clamp_min(0), self.embed_tokens.weight)
        cos, sin = self.rope(position_ids, hidden.dtype)
        hidden = self.fc(torch.cat((embed_BSD, hidden), dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return hidden, hidden

    def logits(self, head_input: Tensor) -> Tensor:
        """Logits of the target's head, [.., V]."""
        return functional.linear(head_input, self.lm_head.weight)

    def propose(self, head_input: Tensor) -> Tensor:
        """Greedy draft tokens of rows [..., D]: int32 target ids."""
        return self.logits(head_input).argmax(dim=-1).to(torch.int32)

    def describe(self) -> str:
        """The resolved spec on one line."""
        return self.config.describe()


class FirstLayer(nn.Module):
    """A decoder layer without an input norm: fc's output enters the attention directly."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden_BSD = hidden_BSD + self.self_attn(hidden_BSD, cos, sin)
        output_BSD: Tensor = hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))
        return output_BSD
