"""Scarce blocks, shared prefixes: records and samples are what they would be alone.

Float64 on the eager backend, against plain decoding of one request at a time without any of it.
(tests/fuzz does this for the tokens of every method.)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.methods.save_hidden_states import SavedStates
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from tests.support.hooks import seen_by_hooks
from tests.support.models import VOCAB, assert_nothing_held, tiny_target

MAX_SEQ_LEN, K = 80, 3
SIZES: dict[str, Any] = {"backend": "eager", "max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4,
                         "max_prefill_tokens": 32}  # fmt: skip
SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 1.2, "seed": 8, "top_k": 9, "min_new_tokens": 18, "stop_token_ids": range(40)},
    {"temperature": 0.6, "seed": 9, "num_draft_tokens": 1, "logit_bias": {5: 2.0}},
    {"logprobs": 2, "temperature": 0.9, "seed": 11},
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]


@pytest.fixture(scope="module")
def lab() -> tuple[nn.Module, list[Asked]]:
    """A target, and what requests over few beginnings must get."""
    model = tiny_target("llama", num_layers=2)
    draw = random.Random(7)
    beginnings = [[draw.randrange(3, VOCAB) for _ in range(48)] for _ in range(2)]
    asked = []
    with compilespec.compile(
        model, enable_prefix_caching=False, **{**SIZES, "max_batch_size": 1}
    ) as plain:
        for number in range(14):
            start = beginnings[number % 2][: draw.choice((5, 17, 33, 40, 48))]
            prompt = start + [draw.randrange(3, VOCAB) for _ in range(draw.choice((1, 2, 9)))]
            params = SamplingParams(
                max_new_tokens=draw.choice((20, 30, 60)), ignore_eos=True,
                **SAMPLED[number % len(SAMPLED)],
            )  # fmt: skip
            (output,) = plain.generate([prompt], params)
            asked.append(Asked(prompt=prompt, params=params, tokens=output.token_ids))
        assert plain.stats().num_preemptions == plain.stats().num_cached_tokens == 0
    assert len({tuple(ask.tokens) for ask in asked}) == len(asked)
    return model, asked


def serve(engine: Engine, asked: list[Asked]) -> list[Request]:
    """All at once, and then again one after the other while the first ones run."""
    requests = [engine.submit(ask.prompt, ask.params) for ask in asked[:6]]
    for ask in asked[6:]:
        engine.step()
        requests.append(engine.submit(ask.prompt, ask.params))
    while engine.has_work:
        engine.step()
    return requests


def check(engine: Engine, model: nn.Module, asked: list[Asked]) -> list[Request]:
    requests = serve(engine, asked)
    for request, ask in zip(requests, asked, strict=True):
        assert request.error is None
        assert request.output_token_ids == ask.tokens, f"{ask.params}"
    stats = engine.stats()
    assert stats.num_preemptions > 2
    assert stats.num_recompiles == 0
    assert_nothing_held(engine)
    return requests


def test_recorded_states_survive_preemption(lab, tmp_path):
    """Every request has one record, of all its tokens; prefixes are not shared, which is said."""
    model, asked = lab
    asked = [ask for ask in asked if ask.params.num_draft_tokens is None]
    with compilespec.compile(
        model, "save_hidden_states", output_dir=tmp_path, aux_layers=(0, 1), kv_cache_tokens=112,
        **SIZES,
    ) as engine:  # fmt: skip
        assert engine.plan()["prefix_caching"] == (
            "off: the hidden states of every prompt token are recorded"
        )
        check(engine, model, asked)
    saved = SavedStates(tmp_path)
    found = {tuple(record["input_ids"].tolist()): record for record in saved}
    assert set(found) == {(*ask.prompt, *ask.tokens)[:-1] for ask in asked}
    for tokens, record in found.items():
        wanted = seen_by_hooks(model, list(tokens), (0, 1))
        torch.testing.assert_close(record["hidden_states"], wanted, atol=1e-9, rtol=1e-9)


def test_samples_of_a_prompt_share_its_blocks(lab):
    model, asked = lab
    with compilespec.compile(model, **SIZES) as engine:
        prompt = asked[4].prompt
        params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=4, n=3, ignore_eos=True)
        outputs = engine.generate(prompt, params)
        assert engine.stats().num_cached_tokens == 2 * ((len(prompt) - 1) // 16 * 16) > 0
        engine.reset_prefix_cache()
        again = engine.generate(prompt, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in again]
        assert len({tuple(o.token_ids) for o in outputs}) == 3
