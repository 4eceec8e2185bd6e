"""Numbers that float32 cannot hold: plain decoding, chains and trees give the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import compilespec
from compilespec import DraftTree, SamplingParams
from compilespec.errors import InvalidRequest
from compilespec.runtime.engine import Engine
from tests.support.drafters import noisy
from tests.support.models import tiny_target

EXTREMES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1e39},
    "frequency below": {"frequency_penalty": -1e39, "bad_token_ids": (5, 6)},
    "frequency that overflows by counts": {"frequency_penalty": -3e38, "bad_token_ids": (5, 6)},
    "presence": {"presence_penalty": 1e39, "frequency_penalty": -1e39},
    "presence below": {"presence_penalty": -1e300, "frequency_penalty": 3e38},
    "repetition": {"repetition_penalty": 1e39, "temperature": 1e-5},
    "repetition near 0": {"repetition_penalty": 1e-46},
    "temperature": {"temperature": 1e39, "bad_token_ids": tuple(range(50))},
    "temperature of integers": {"temperature": 10**300, "min_p": 0.5},
    "top_p near 0": {"temperature": 1.0, "top_p": 1e-46},
    "min_p near 0": {"temperature": 1.0, "min_p": 1e-46},
    "bias": {"logit_bias": {7: 1e39, 8: 1e300, 9: -1e39}, "bad_token_ids": (8,)},
    "bias, drawn": {"logit_bias": {7: 3e38, 8: 3e38, 9: -3e38}, "temperature": 1e-4},
    "all of them": {
        "logit_bias": {7: 1e39, 8: -1e39}, "frequency_penalty": -1e39, "presence_penalty": 1e39,
        "repetition_penalty": 1e39, "temperature": 1e39, "bad_token_ids": (9,),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    model = tiny_target("llama", num_layers=1)
    drafts: dict[str, Any] = {"spec": "draft_model", "draft": noisy(model)}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "chain": {**drafts, "num_draft_tokens": 3},
        "tree": {**drafts, "draft_tree": DraftTree(top_k=2, depth=2, num_nodes=4)},
        "rejection": {**drafts, "num_draft_tokens": 2, "acceptance": "rejection"},
    }
    made = {
        name: compilespec.compile(model, backend="eager", max_seq_len=64, **how)
        for name, how in ways.items()
    }
    yield made
    for engine in made.values():
        engine.close()


def test_tokens_are_those_of_plain_decoding(engines):
    """Those of greedy requests also with rejection, whose draws are others."""
    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3, **extreme)
        for extreme in EXTREMES.values()
    ]
    found = {}
    for name, engine in engines.items():
        outputs = engine.generate([[5, 6, 7, 7]] * len(params), params)
        assert [output.error for output in outputs] == [None] * len(params), name
        found[name] = dict(zip(EXTREMES, (output.token_ids for output in outputs), strict=True))
    assert found["chain"] == found["plain"]
    assert found["tree"] == found["plain"]
    for name, one in zip(EXTREMES, params, strict=True):
        assert one.temperature or found["rejection"][name] == found["plain"][name], name
        for way in found.values():
            assert not set(way[name]) & set(one.bad_token_ids or ()), name
    assert len(set(found["plain"]["frequency"])) == 12  # none is said twice
    assert len(set(found["plain"]["frequency below"])) == 1
    assert found["plain"]["bias"] == [7] * 12
    assert len(set(found["plain"]["temperature"])) > 6  # uniform


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), float("inf"), float("nan")], ids=["large", "small", "inf", "nan"]
)
def test_numbers_that_are_not_finite_are_refused(value):
    for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty",
                 "top_p", "min_p"):  # fmt: skip
        with pytest.raises(InvalidRequest, match=f"SamplingParams.{name}: expected"):
            SamplingParams(**{name: value})
    with pytest.raises(InvalidRequest, match=r"SamplingParams.logit_bias: expected finite"):
        SamplingParams(logit_bias={1: value})


def test_messages_hold_the_beginning_of_what_came():
    with pytest.raises(InvalidRequest, match=r"\(\d+ characters\)") as caught:
        SamplingParams(temperature=10**400)
    assert len(str(caught.value)) < 300
