"""A target whose distribution is known: its logits depend on the last token alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compilespec import SamplingParams
from tests.support.models import PlainModel

VOCAB, K, PROMPT, LENGTH, SAMPLES = 13, 3, [3, 7, 5], 7, 1500


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 6, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
    "bias": {"logit_bias": {4: 2.0}, "bad_token_ids": (1, 5), "temperature": 1.4},
    "one_draft": {"num_draft_tokens": 1},
    "no_draft": {"num_draft_tokens": 0},
}


def markov_target() -> PlainModel:
    """13 ids; its logits depend on the last token alone."""
    torch.manual_seed(0)
    model = PlainModel(width=16, num_layers=1, num_heads=2, max_positions=64)
    model.tokens, model.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
    model = model.double().eval()
    with torch.no_grad():
        model.places.weight.zero_()
        model.head.weight.copy_(torch.randn(VOCAB, 16) * 0.4)
        for linear in (model.blocks[0].out, model.blocks[0].down):
            linear.weight.zero_()
            linear.bias.zero_()
    return model


def params_of(kind: str, **changes: Any) -> SamplingParams:
    options = {"max_new_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True, "seed": 11}
    return SamplingParams(**{**options, **KINDS[kind], **changes})
