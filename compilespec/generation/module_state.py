"""The present state of a module: its weights, its form, the forward that it computes with."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from compilespec.errors import NotSupported


def form_of(model: Any) -> tuple[Any, ...]:
    """Dtypes, devices and attention of a module, which a compiled program has fixed."""
    tensors = tuple((t.dtype, t.device) for t in model.parameters())
    return tensors, getattr(model.config, "_attn_implementation", None)


def weights_of(model: Any) -> list[tuple[int, ...]]:
    """Changes when a parameter or a buffer is written in place, or replaced."""
    return [version_of(tensor) for tensor in [*model.parameters(), *model.buffers()]]


def version_of(tensor: Tensor) -> tuple[int, ...]:
    """Changes when a tensor is written in place, or replaced."""
    return tensor.data_ptr(), tensor._version, _num_steps().get(tensor, 0)


@functools.cache
def _num_steps() -> MutableMapping[Tensor, int]:
    """The steps of optimizers by parameter, from the first call on: fused ones write it and leave
    its version as it is.
    """
    counts: MutableMapping[Tensor, int] = WeakIdKeyDictionary()

    def count(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                counts[parameter] = counts.get(parameter, 0) + 1

    register_optimizer_step_post_hook(count)
    return counts


def check_computes_as_compiled(model: nn.Module) -> None:
    """Raises: NotSupported where the module's forward is another than when it was compiled."""
    _check_dropout(model)
    _check_forward(model)


def _check_dropout(model: Any) -> None:
    """Refuse a training model whose tokens its dropout would change."""
    if not model.training:
        return
    for name, module in model.named_modules():
        rates = [getattr(module, "p", 0)] if "Dropout" in type(module).__name__ else []
        rates += [getattr(module, key, 0) for key in ("attention_dropout", "dropout")]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise NotSupported(
                f"generate: {name} drops values at random, because the model is in training mode; "
                "call model.eval()"
            )


def _check_forward(model: Any) -> None:
    if hasattr(model, "_original_forward") or hasattr(model, "_hf_hook"):
        raise NotSupported(
            "attach: Accelerate changed the model's forward (mixed precision, or weights that it "
            "moves); give accelerator.unwrap_model(model, keep_fp32_wrapper=False), train with "
            "bf16=False and fp16=False, or load the model without device_map="
        )
