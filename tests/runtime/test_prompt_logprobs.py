"""Log-probabilities of prompt tokens: the model's own, for any chunks, at nobody's cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption, InvalidRequest
from compilespec.methods.eagle3 import random_head
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_rows import TokenLogprobs
from tests.support.models import target_info, tiny_target

PROMPTS = ([5, 6, 7], list(range(20, 53)), [11], [90, 3, 90, 3, 90])
SIZES: dict[str, Any] = {"backend": "eager", "max_seq_len": 64, "max_batch_size": 4,
                         "max_prefill_tokens": 9}  # fmt: skip


def asks(count: int | None, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=3, ignore_eos=True, prompt_logprobs=count, **fields)


def check(
    model: nn.Module, prompt: list[int], noted: list[TokenLogprobs | None], count: int
) -> None:
    """Against float64 log-softmax of the model's logits, within 1e-5: norms are in float32."""
    with torch.no_grad():
        came = model(torch.tensor([prompt]))
    logits = (came if isinstance(came, torch.Tensor) else came.logits)[0].double()
    assert len(noted) == len(prompt)
    assert noted[0] is None
    for entry, token, row in zip(noted[1:], prompt[1:], logits.log_softmax(-1), strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        best = row.sort(descending=True)
        assert list(entry.top) == best.indices[:count].tolist()
        assert list(entry.top.values()) == pytest.approx(best.values[:count].tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_target("llama", num_layers=2)


@pytest.fixture(scope="module", params=[pytest.param("none", marks=pytest.mark.slow), "eagle3"])
def engine(model, request) -> Iterator[Engine]:
    spec: dict[str, Any] = {}
    if request.param != "none":
        head = random_head(target_info(model, 64), aux_layers=(0, 1, 2))
        spec = {"spec": request.param, "draft": head, "num_draft_tokens": 3}
    with compilespec.compile(model, prompt_logprobs=True, **spec, **SIZES) as made:
        yield made


def test_they_are_the_models(model, engine):
    """Prompts that share a call, are cut into chunks, ask for much, little or nothing."""
    params = [asks(0), asks(4), asks(20), asks(None)]
    outputs = engine.generate(list(PROMPTS), params)
    for prompt, output, one in zip(PROMPTS, outputs, params, strict=True):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(model, prompt, output.prompt_logprobs, one.prompt_logprobs)
    plain = engine.generate(list(PROMPTS), asks(None))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_beside_sampling(model, engine):
    """Of the logits as they are, for each of the samples, with the output's own."""
    params = asks(2, n=2, temperature=1.5, seed=1, top_k=2, logprobs=1, bad_token_ids=(6,))
    for output in engine.generate([PROMPTS[0]], params):
        check(model, PROMPTS[0], output.prompt_logprobs, 2)
        assert len(output.logprobs) == 3


@pytest.mark.parametrize("family", ["gemma2", pytest.param("plain", marks=pytest.mark.slow)])
def test_other_heads(family):
    """Capped logits of a head that is tied to the embedding; a module nobody registered."""
    model = tiny_target(family, num_layers=2)
    with compilespec.compile(model, prompt_logprobs=True, **SIZES) as engine:
        (output,) = engine.generate([PROMPTS[1]], asks(3))
    check(model, PROMPTS[1], output.prompt_logprobs, 3)


def test_what_is_refused(model, engine):
    with pytest.raises(InvalidRequest, match="prompt_logprobs: expected at most 20, got 21"):
        engine.generate(PROMPTS[0], asks(21))
    with pytest.raises(InvalidOption, match="prompt_logprobs must be True or False"):
        compilespec.compile(model, prompt_logprobs=3, **SIZES)
