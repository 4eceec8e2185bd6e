"""The margin rule: where tokens may part in float32, and how often."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from compilespec.runtime.request import Request
from tests.support.models import (
    Ask,
)

# Logits here are of order 1 and pass through few layers of width 48: 1000 units in the last place
# of float32 (1.2e-4) are well above what rounding does to them and far below what a wrong cache
# entry does (about 0.1).
LOGIT_BOUND = 1000 * torch.finfo(torch.float32).eps


MAX_PARTED = 1  # of the requests of one comparison


def assert_same_tokens(
    reference: nn.Module,
    asks: Sequence[Ask],
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
) -> None:
    """Equal, but for at most MAX_PARTED requests, both of whose ways are best by LOGIT_BOUND."""
    num_parted = 0
    for ask, *ways in zip(asks, left, right, strict=True):
        assert [len(tokens) for tokens in ways] == [len(ask.tokens)] * 2
        if list(ways[0]) != list(ways[1]):
            num_parted += 1
            for tokens in ways:
                short = shortfall(reference, ask.prompt, tokens)
                assert short < LOGIT_BOUND, (
                    f"prompt of {len(ask.prompt)}: {short:.2e} below the best"
                )
    assert num_parted <= MAX_PARTED


def shortfall(reference: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How far, at most, the logit of a token lies below the best one of its context."""
    with torch.no_grad():
        output = reference(torch.tensor([[*prompt, *tokens]]))
    logits_TV = getattr(output, "logits", output)[0, len(prompt) - 1 : -1]
    chosen_T = logits_TV.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    return float((logits_TV.max(-1).values - chosen_T).max())


def tokens_of(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]
