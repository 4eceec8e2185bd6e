"""A model's Python code that asks for the number of tokens is served, or refused by its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import compilespec
from compilespec import SamplingParams
from compilespec.errors import UnsupportedModel
from compilespec.tracing.target import trace_target
from tests.support.models import VOCAB, PlainModel, enliven, recomputed

PROMPT = [3 + 5 * n % 31 for n in range(29)]


class _Scaled(PlainModel):
    """Halves its hidden states where `asks` says so for the number of tokens."""

    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return logits * 0.5 if self.asks(ids.shape[1]) else logits


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        (lambda count: count > 40, r"another way from 41 tokens on \(it asks for T <= 40"),
        (lambda count: count < 8, r"between calls of 7 and of 13 tokens \(it asks for T >= 8"),
        (lambda count: count % 2 == 0, "between calls of 12 and of 13 tokens"),
    ],
)
def test_another_way_is_refused(asks: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as raised:
        trace_target(_Scaled(asks), longest=128)
    assert "test_branches.py" in str(raised.value)


def test_a_limit_past_the_longest_request_is_no_matter() -> None:
    traced = trace_target(_Scaled(lambda count: count > 40), longest=40)
    assert [(one.shorter, one.longer) for one in traced.branches] == [(0, 41)]


def _doge(**fields: int | None) -> Any:
    torch.manual_seed(0)
    config = transformers.DogeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, **fields,
    )  # fmt: skip
    model = enliven(transformers.DogeForCausalLM(config).eval(), "doge")
    for layer in model.model.layers:  # zeros at first, with which all keys tie
        torch.nn.init.uniform_(layer.self_attn.A, 0.1, 0.5)
    return model


@pytest.mark.parametrize("fields", [{"keep_window_size": 5}, {"sliding_window": 7}])
def test_a_selection_of_keys_and_a_window_serve_all_lengths(fields: dict[str, int]) -> None:
    model = _doge(**fields)
    engine = compilespec.compile(
        model, spec="ngram", num_draft_tokens=2, backend="eager", max_seq_len=64
    )
    for prompt in (PROMPT[:3], PROMPT):
        output = engine.generate([prompt], SamplingParams(max_new_tokens=8))[0]
        assert output.token_ids == recomputed(model, prompt, 8)


def test_a_selection_past_the_captured_length_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"from 25 tokens on .* modeling_doge\.py:"):
        trace_target(_doge(keep_window_size=24), longest=64)
    assert trace_target(_doge(keep_window_size=24), longest=24).branches
