"""Log-probabilities of given tokens, as the engine that samples them computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidOption, InvalidRequest
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams

APART = {torch.float64: 1e-3, torch.float32: 1e-2}  # the largest difference that is rounding
APART_OTHERS = 1.0


def log_probs(
    engine: Engine,
    ids: Sequence[Sequence[int]],
    *,
    model: nn.Module | None = None,
    adapter: str | None = None,
) -> list[Tensor]:
    """The log-probability of each token but the first, float32, under the engine's weights.

    The engine's own graph computes them, with all tokens given.  Its rows do not depend on each
    other where `Rollout.why_not_exact` is None: these are then the bits of `Rollout.log_probs`,
    with any drafter.

    Args:
        engine: compiled with prompt_logprobs=True; requests that run go on meanwhile.
        ids: prompt and sampled tokens of each sequence, at most `max_seq_len - 1`.
        model: the module that is trained, whose weights the engine has.  The values stay those of
            the engine, and their gradients are those of the module's own forward.
        adapter: the adapter that the rollouts asked for.
    Raises: InvalidOption (not an engine), InvalidRequest (sequences that it cannot read; a module
        whose own log-probabilities are others than rounding explains), NotSupported.
    """
    if not isinstance(engine, Engine):
        raise InvalidOption(
            f"log_probs: expected the engine that samples, got {type(engine).__name__}; compile "
            "the model with prompt_logprobs=True, and give model= for gradients"
        )
    sequences = [[int(token) for token in one] for one in ids]
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True, adapter=adapter)
    scored = []
    for output in engine.generate(sequences, params) if sequences else ():
        if output.error is not None:
            raise output.error
        noted: list[Any] = (output.prompt_logprobs or [])[1:]
        scored.append(torch.tensor([one.logprob for one in noted], dtype=torch.float32))
    if model is None:
        return scored
    return [
        _with_gradient(*_of_module(model, one), values)
        for one, values in zip(sequences, scored, strict=True)
    ]


def _of_module(model: nn.Module, tokens: Sequence[int]) -> tuple[Tensor, torch.dtype]:
    """The module's own log-probabilities, and the dtype of its logits."""
    device = next(model.parameters()).device
    ids_1T = torch.tensor([tokens], device=device)
    logits = model(ids_1T)
    logits = getattr(logits, "logits", logits)
    wide = logits[0, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    own: Tensor = wide.log_softmax(-1).gather(1, ids_1T[0, 1:, None]).squeeze(1)
    return own, logits.dtype


def _with_gradient(own: Tensor, dtype: torch.dtype, values: Tensor) -> Tensor:
    """Raises: InvalidRequest where the two are of different weights."""
    values = values.to(own.device)
    apart = (own.detach().float() - values).abs().max().item() if len(values) else 0.0
    most = APART.get(dtype, APART_OTHERS)
    if not apart <= most:
        raise InvalidRequest(
            f"log_probs: the module's log-probabilities differ from the engine's by {apart:.3g}, "
            f"more than rounding ({most:g}): give it the engine's weights, as by "
            "engine.update_weights(model), and eval()"
        )
    replaced: Tensor = _Replaced.apply(own, values)  # type: ignore[no-untyped-call]
    return replaced


class _Replaced(torch.autograd.Function):
    """Values of one tensor, gradients of another."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = own.dtype
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None
