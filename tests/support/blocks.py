"""Blocks of a DFlash drafter from scratch: dense attention under the masks of its sources."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compilespec.methods.dflash import DFlashDrafter
from compilespec.methods.parts.layers import rotate


@torch.no_grad()
def run_block(drafter: DFlashDrafter, aux_TE: Tensor, token: int, position: int) -> Tensor:
    """The last hidden states of a block [W, D], by the masks of speculators and transformers."""
    config = drafter.config
    hidden_TD = drafter.hidden_norm(drafter.fc(aux_TE[:position]))[None]
    at_J = torch.arange(position + config.block_size)
    ids = torch.tensor([token, *[config.mask_token_id] * (config.block_size - 1)])
    x = drafter.embed_tokens.weight[ids][None]
    for layer, window in zip(drafter.layers, config.windows, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        key, value = attention.keys(
            torch.cat([hidden_TD, normed], 1), *drafter.rope(at_J[None], x.dtype)
        )
        query = attention.q_norm(attention.q_proj(normed).unflatten(-1, (config.num_heads, -1)))
        query = rotate(query, *drafter.rope(at_J[None, position:], x.dtype)).transpose(1, 2)
        at_Q1, anchor = at_J[position:, None], position
        seen_QJ = torch.ones(config.block_size, len(at_J), dtype=torch.bool)
        if window and config.sight == "distance":
            seen_QJ = (at_Q1 - at_J).abs() <= window
        elif window:
            seen_QJ = (at_J >= anchor - window).expand_as(seen_QJ)
            if config.sight == "causal":
                seen_QJ = seen_QJ & (at_J <= at_Q1)
        heads = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen_QJ, scale=config.head_dim**-0.5, enable_gqa=True
        )
        x = x + attention.o_proj(heads.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return drafter.norm(x)[0]


@torch.no_grad()
def block_after(model: nn.Module, drafter: DFlashDrafter, tokens: tuple[int, ...]) -> Tensor:
    """The last hidden states [W, D] of the block that begins with the last of a text's tokens."""
    states = model(torch.tensor(tokens)[None, :-1], output_hidden_states=True).hidden_states
    states = [*states[:-1], hidden_before_norm(model, tokens[:-1]), states[-1]]
    aux_TE = torch.cat([states[layer][0] for layer in drafter.aux_layers], -1)
    return run_block(drafter, aux_TE, tokens[-1], len(tokens) - 1)


def hidden_before_norm(model: nn.Module, tokens: tuple[int, ...]) -> Tensor:
    """What enters the last norm, which transformers' hidden states have passed."""
    seen = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.tensor(tokens)[None])
    hook.remove()
    return seen[0]
