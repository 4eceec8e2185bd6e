"""Hidden states as forward hooks on the unmodified model see them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compilespec.tracing.attention import marked_attention


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    return max(
        (m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda layers: len(layers)
    )


def hook_states(model: nn.Module, call: Callable[[], object]) -> list[Tensor]:
    """hs[0..n] as hooks see them: the input of every decoder layer, the last one's output."""
    states: list[Tensor] = []

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).clone())

    def after(_: nn.Module, args: object, output: object) -> None:
        states.append((output if isinstance(output, Tensor) else output[0]).clone())

    layers = decoder_layers(model)
    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(after))
    try:
        with torch.no_grad():
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return states


def seen_by_hooks(model, tokens, layers):
    with marked_attention(model):  # transformers' eager attention rounds to float32
        states = hook_states(model, lambda: model(torch.tensor([tokens])))
    return torch.cat([states[k][0] for k in layers], -1)
