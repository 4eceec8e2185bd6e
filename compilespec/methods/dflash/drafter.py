"""The DFlash drafter module: hidden states of the target in, a block of draft tokens out.

Its state_dict uses speculators' names: fc, hidden_norm, layers.{i}, norm, lm_head, embed_tokens,
d2t.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import compilespec.ops.attention  # noqa: F401  (registers the operator that BlockAttention calls)
from compilespec.methods.block import BlockDrafter
from compilespec.methods.dflash.config import DFlashConfig
from compilespec.methods.parts.d2t import DraftHead
from compilespec.methods.parts.layers import MLP, RMSNorm, Rope, rotate
from compilespec.methods.parts.weights import Weight


class DFlashDrafter(DraftHead, BlockDrafter):
    """One DFlash drafter.

    Every layer's keys and values of the context are projections of one vector a position, made of
    the target's hidden states there.  The rows of a block, the newest token and masks, add theirs,
    see the context and each other, and leave nothing behind.

    Source: Chen et al. 2026 (DFlash); speculators 0.9 and transformers 5.23, whose windows differ.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.num_draft_tokens = config.num_draft_tokens
        self.num_proposing_rows = config.num_proposing_rows
        self.num_layers = config.num_layers
        self.aux_layers = config.aux_layers
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.embed_tokens = Weight(config.vocab_size, width)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, eps)
        self.add_head(config)

    def context(self, aux: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of true positions, [B, Nkv, S, H], of layer 0, 1, ...

        Args:
            aux: the target's aux hidden states, concatenated, [B, S, A*D]; position_ids: of these.
        """
        hidden_BSD = self.hidden_norm(self.fc(aux))
        cos, sin = self.rope(position_ids, hidden_BSD.dtype)
        parts: list[Tensor] = []
        for layer in self.layers:
            parts += layer.self_attn.keys(hidden_BSD, cos, sin)  # type: ignore[operator,union-attr]
        return tuple(parts)

    def block(self, token: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Ids and positions of the block's rows [B, W], and what they see in each layer.

        Args:
            token: int32 [B], the newest; position: int32 [B], its own.
        """
        size = self.config.block_size
        row_W = torch.arange(size, dtype=torch.int32, device=token.device)
        ids_BW = torch.where(row_W == 0, token.unsqueeze(1), self.config.mask_token_id)
        position_BW = position.unsqueeze(1) + row_W
        nothing_BW = torch.zeros_like(position_BW)
        sights = []
        for window in self.config.windows:
            back_W, low_W, high_W = self._sight(row_W, window)
            first_BW = nothing_BW if back_W is None else position_BW - back_W
            row_WW = low_W.unsqueeze(1) + row_W
            path_WW = torch.where(row_WW <= high_W.unsqueeze(1), row_WW, -1)
            sights += [first_BW, path_WW + nothing_BW.unsqueeze(2)]
        return ids_BW, position_BW, *sights

    def _sight(self, row_W: Tensor, window: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """How far each row sees back from its own position, and the first and the last row that it
        sees.
        """
        first_W, last_W = torch.zeros_like(row_W), torch.full_like(row_W, len(row_W) - 1)
        if not window:
            return None, first_W, last_W
        if self.config.sight == "distance":
            low_W, high_W = (
                (row_W - window).clamp(min=0),
                (row_W + window).clamp(max=len(row_W) - 1),
            )
            return torch.full_like(row_W, window), low_W, high_W
        return row_W + window, first_W, last_W if self.config.sight == "anchor" else row_W

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Run the layers over a block [B, W]; returns what `propose` takes, [B, N, D]."""
        return self.proposing(self.rows(input_ids, position_ids))

    def proposing(self, head_input: Tensor) -> Tensor:
        """Of all rows of a block those that propose, [B, N, D]."""
        return head_input[:, int(not self.config.sample_from_anchor) :]

    def rows(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The same of all rows, [B, W, D]."""
        hidden = functional.embedding(input_ids.clamp_min(0), self.embed_tokens.weight)
        cos, sin = self.rope(position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        hidden_BWD: Tensor = self.norm(hidden)
        return hidden_BWD

    def describe(self) -> str:
        """The resolved spec on one line."""
        return self.config.describe()


class BlockLayer(nn.Module):
    """A pre-norm decoder layer over the rows of a block."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden_BWD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden_BWD = hidden_BWD + self.self_attn(self.input_layernorm(hidden_BWD), cos, sin)
        output_BWD: Tensor = hidden_BWD + self.mlp(self.post_attention_layernorm(hidden_BWD))
        return output_BWD


class BlockAttention(nn.Module):
    """Grouped-query attention, heads normed, whose keys may be made of other vectors as well."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, Nkv, S, H]."""
        shape = (*x_BSD.shape[:2], self.num_kv_heads, self.head_dim)
        key = rotate(self.k_norm(self.k_proj(x_BSD).view(shape)), cos, sin)
        return key.transpose(1, 2), self.v_proj(x_BSD).view(shape).transpose(1, 2)

    def forward(self, x_BWD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, rows, _ = x_BWD.shape
        query = self.q_norm(self.q_proj(x_BWD).view(batch, rows, self.num_heads, self.head_dim))
        query, (key, value) = rotate(query, cos, sin), self.keys(x_BWD, cos, sin)
        heads = torch.ops.compilespec.attention(
            query.transpose(1, 2), key, value, self.head_dim**-0.5, 0, 0.0, None
        )
        output_BWD: Tensor = self.o_proj(heads.reshape(batch, rows, self.num_heads * self.head_dim))
        return output_BWD
