"""Query-only drafter modules.  The assistant's state_dict uses the published names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

import compilespec.ops.attention  # noqa: F401  (registers the operator)
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.parts.layers import rotate
from compilespec.methods.parts.weights import Weight
from compilespec.methods.recycled import RecycledDrafter
from compilespec.methods.shared_kv.config import AssistantConfig, AssistantLayer
from compilespec.tracing.target_info import KVLayer


class SharedKVDrafter(RecycledDrafter):
    """A drafter whose attention reads caches of the target and writes none.

    `kv_layers` names the target layer of each attention, in the order of the calls.  `forward` is
    called once a draft, at [B, 1]: with the newest token, the position of the newest key (the same
    for all drafts) and the hidden state, first the target's, then the recycled one.  Attention goes
    through `attend`, whose keys and values the program replaces by the target's.
    """

    aux_layers = (FINAL_NORM,)

    def combine(self, aux: Tensor) -> Tensor:
        """Return the target's last hidden state unchanged."""
        return aux


def attend(query_BNTH: Tensor, kv: KVLayer, *, scale: float, window: int) -> Tensor:
    """Attention of queries alone, [B, N, T, H] in, [B, T, N, Hv] out.

    `kv` gives the sizes of the target's cache; the keys and values passed here are never read.
    """
    batch, _, rows, _ = query_BNTH.shape
    key = query_BNTH.new_zeros(batch, kv.num_heads, rows, kv.key_dim)
    value = query_BNTH.new_zeros(batch, kv.num_heads, rows, kv.value_dim)
    output: Tensor = torch.ops.compilespec.attention(
        query_BNTH, key, value, scale, window, 0.0, None
    )
    return output


class AssistantDrafter(SharedKVDrafter):
    """Gemma-4's assistant: a few narrow layers on the target's [embedding ; hidden].

    Source: transformers' `gemma4_assistant`.
    """

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.config = config
        self.num_draft_tokens = config.num_draft_tokens
        self.kv_layers = tuple(layer.kv_layer for layer in config.layers)
        width, backbone = config.hidden_size, config.backbone_hidden_size
        self.embed_scale = backbone**0.5
        self.target_embedding = Weight(config.vocab_size, backbone)
        self.pre_projection = nn.Linear(2 * backbone, width, bias=False)
        self.model = Layers(config)
        self.post_projection = nn.Linear(width, backbone, bias=False)
        self.masked_embedding = OrderedHead(config) if config.num_centroids else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the layers on one query per row.

        Args:
            input_ids: [B, T] target ids, the newest token of each row; negative ids count as 0.
            position_ids: of the newest key.
            hidden: [B, T, Hb], the target's after its final norm, or recycled.
        Returns:
            head_input [B, T, H] for `propose`, and the recycled hidden state [B, T, Hb].
        """
        embed = functional.embedding(input_ids.clamp_min(0), self.target_embedding.weight)
        x = self.pre_projection(torch.cat((embed * self.embed_scale, hidden), dim=-1))
        if self.config.query_position == "bonus":
            position_ids = position_ids + 1
        head_input: Tensor = self.model(x, position_ids)
        return head_input, self.post_projection(head_input)

    def propose(self, head_input: Tensor) -> Tensor:
        """Greedy draft tokens of rows [..., H]: int32 target ids."""
        weight = self.model.embed_tokens.weight
        if self.masked_embedding is not None:
            return self.masked_embedding(head_input, weight)
        return functional.linear(head_input, weight).argmax(dim=-1).to(torch.int32)

    def describe(self) -> str:
        """The resolved spec on one line."""
        return self.config.describe()


class Layers(nn.Module):
    """The decoder layers, their final norm, and the embedding that serves as head."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(QueryLayer(config, layer) for layer in config.layers)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, position_ids)
        output: Tensor = self.norm(x)
        return output


class QueryLayer(nn.Module):
    """A decoder layer: norms before and after attention and MLP, and a factor on its output."""

    layer_scalar: Tensor

    def __init__(self, config: AssistantConfig, layer: AssistantLayer) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = QueryAttention(config, layer)
        self.mlp = GatedMLP(config)
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.pre_feedforward_layernorm = Norm(width, eps)
        self.post_feedforward_layernorm = Norm(width, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), position_ids)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class QueryAttention(nn.Module):
    """Queries, normed and rotated, on the target's keys; scores are not scaled."""

    inv_freq: Tensor

    def __init__(self, config: AssistantConfig, layer: AssistantLayer) -> None:
        super().__init__()
        self.layer, self.num_heads = layer, config.num_heads
        width, head_dim = config.hidden_size, layer.kv.key_dim
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=False)
        self.q_norm = Norm(head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(config.num_heads * layer.kv.value_dim, width, bias=False)
        with torch.device("cpu"):  # real values even when the module is built on the meta device
            inv_freq = rope_frequencies(dict(layer.rope), head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        query = self.q_norm(self.q_proj(x).view(batch, rows, self.num_heads, -1))
        angle = position_ids[..., None].to(torch.float32) * self.inv_freq
        angle = torch.cat((angle, angle), dim=-1).unsqueeze(-2)
        query = rotate(query, angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        heads = attend(query.transpose(1, 2), self.layer.kv, scale=1.0, window=self.layer.window)
        output: Tensor = self.o_proj(heads.reshape(batch, rows, -1))
        return output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QueryAttention:
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = exact.to(self.inv_freq.device)
        return self


class GatedMLP(nn.Module):
    """Gated MLP without biases."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return output


class OrderedHead(nn.Module):
    """A head that scores only the tokens of the nearest clusters."""

    token_ordering: Tensor

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.top_k = config.centroid_top_k
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.int64))

    def forward(self, head_input: Tensor, weight_VH: Tensor) -> Tensor:
        """The best token of rows [B, H] among the chosen clusters', int32 [B]."""
        clusters_CM = self.token_ordering.view(self.centroids.out_features, -1)
        chosen_BK = self.centroids(head_input).topk(self.top_k, dim=-1).indices
        tokens_BT = clusters_CM[chosen_BK].flatten(1)
        logits_BT = (weight_VH[tokens_BT] @ head_input.unsqueeze(-1)).squeeze(-1)
        best_B1 = logits_BT.argmax(dim=-1, keepdim=True)
        return tokens_BT.gather(1, best_B1).squeeze(1).to(torch.int32)


class Norm(nn.Module):
    """y * w, all in float32 or wider, as Gemma-4 does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        return (wide * self.weight.to(wide.dtype)).to(x.dtype)


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Inverse frequencies, float32 [H/2]; "proportional" leaves all but a part of them at 0."""
    part = float(rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "default":
        part = 1.0
    num_angles = int(part * head_dim // 2)
    exponents = torch.arange(0, 2 * num_angles, 2, dtype=torch.float32) / head_dim
    rotated = 1.0 / (rope["rope_theta"] ** exponents)
    still = torch.zeros(head_dim // 2 - num_angles)
    return torch.cat([rotated, still]) / float(rope.get("factor", 1.0))
