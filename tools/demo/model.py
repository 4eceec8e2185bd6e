"""A lean Llama for training on a CPU: fused projections, one compiled function per decoder layer.

Dims: B sequences, S positions, D hidden, H head dim, V vocab (N heads, G key-value heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama-layout model; the names follow transformers' LlamaConfig."""

    num_hidden_layers: int = 8
    hidden_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 448
    vocab_size: int = 2048
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def kv_width(self) -> int:
        """Width of the keys (or values) of one position."""
        return self.num_key_value_heads * self.head_dim

    @property
    def q_width(self) -> int:
        """Width of the queries of one position."""
        return self.num_attention_heads * self.head_dim


class Layer(nn.Module):
    """Weights of one decoder layer; `width_in` is the input width of q, k and v."""

    def __init__(self, shape: Shape, width_in: int, residual_std: float) -> None:
        super().__init__()
        D = shape.hidden_size
        self.input_norm = nn.Parameter(torch.ones(D))
        self.post_norm = nn.Parameter(torch.ones(D))
        self.qkv = matrix(shape.q_width + 2 * shape.kv_width, width_in)
        self.o = matrix(D, shape.q_width, std=residual_std)
        self.gate_up = matrix(2 * shape.intermediate_size, D)
        self.down = matrix(D, shape.intermediate_size, std=residual_std)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weights in the order that `decoder_layer` takes."""
        return (
            self.input_norm, self.qkv, self.o, self.post_norm, self.gate_up, self.down,
        )  # fmt: skip


class LeanLlama(nn.Module):
    """The target: tied embeddings, pre-norm decoder layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        std = 0.02 / (2 * shape.num_hidden_layers) ** 0.5
        self.embed = matrix(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, shape.hidden_size, std) for _ in range(shape.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.run_layer: Any = partial(decoder_layer, shape)
        self.run_loss: Any = partial(next_token_loss, shape.rms_norm_eps)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layer and the loss: one Inductor graph serves all the layers."""
        self.run_layer = torch.compile(self.run_layer, dynamic=False, fullgraph=True)
        self.run_loss = torch.compile(self.run_loss, dynamic=False, fullgraph=True)

    def hidden_states(self, ids_BS: Tensor) -> list[Tensor]:
        """Return hs[0..n]: the residual stream entering each layer, and after the last one."""
        cos, sin = rope_table(self.shape, torch.arange(ids_BS.shape[1]))
        hs = [F.embedding(ids_BS, self.embed)]
        for layer in self.layers:
            assert isinstance(layer, Layer)
            hs.append(self.run_layer(hs[-1], cos, sin, *layer.tensors()))
        return hs

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the last hidden state (before the final norm)."""
        return F.linear(rms_norm(hidden, self.norm, self.shape.rms_norm_eps), self.embed)

    def loss(self, ids_BS: Tensor) -> Tensor:
        """Return the mean next-token loss in nats over the S - 1 predicted positions."""
        hidden = self.hidden_states(ids_BS[:, :-1])[-1]
        return self.run_loss(hidden, self.norm, self.embed, ids_BS[:, 1:])


def decoder_layer(
    shape: Shape, x: Tensor, cos: Tensor, sin: Tensor, norm1: Tensor, qkv: Tensor, o: Tensor,
    norm2: Tensor, gate_up: Tensor, down: Tensor,
) -> Tensor:  # fmt: skip
    """Return the residual stream after one causal decoder layer."""
    B, S, _ = x.shape
    q, k, v = split_qkv(shape, F.linear(rms_norm(x, norm1, shape.rms_norm_eps), qkv), cos, sin)
    rep = shape.num_attention_heads // shape.num_key_value_heads
    a = F.scaled_dot_product_attention(
        q, repeat_heads(k, rep), repeat_heads(v, rep), is_causal=True
    )
    x = x + F.linear(a.transpose(1, 2).reshape(B, S, -1), o)
    return x + swiglu(rms_norm(x, norm2, shape.rms_norm_eps), gate_up, down)


def next_token_loss(
    eps: float, hidden: Tensor, norm: Tensor, embed: Tensor, labels: Tensor
) -> Tensor:
    """Return the mean cross entropy of the tied head in nats."""
    logits = F.linear(rms_norm(hidden, norm, eps), embed)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def split_qkv(shape: Shape, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection in rotated q [B, N, S, H], rotated k and v [B, G, S, H]."""
    B, S, _ = qkv.shape
    q, k, v = qkv.split([shape.q_width, shape.kv_width, shape.kv_width], -1)
    heads = [t.view(B, S, -1, shape.head_dim).transpose(1, 2) for t in (q, k, v)]
    return rotate(heads[0], cos, sin), rotate(heads[1], cos, sin), heads[2]


def rope_table(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [len(positions), H] in the half-split layout of transformers."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle = positions.float()[:, None] * shape.rope_theta**-exponent
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to [B, heads, S, H]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the Llama flavour of RMSNorm."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the gated MLP of a fused gate-up projection."""
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def repeat_heads(x: Tensor, rep: int) -> Tensor:
    """Repeat each key-value head for the `rep` query heads that share it."""
    return x.repeat_interleave(rep, dim=1)


def matrix(rows: int, columns: int, std: float = 0.02) -> nn.Parameter:
    """Return a normally initialised weight from the global random state."""
    return nn.Parameter(torch.randn(rows, columns) * std)


def row_blocks(name: str, shape: Shape) -> Sequence[int] | None:
    """Return the row counts of the matrices fused in a parameter, or None for a single one."""
    if name.endswith("qkv"):
        return (shape.q_width, shape.kv_width, shape.kv_width)
    if name.endswith("gate_up"):
        return (shape.intermediate_size, shape.intermediate_size)
    return None
