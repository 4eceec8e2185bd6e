"""What callers may give, what they get back, and what they are told when it is wrong."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from compilespec.errors import EngineClosed, InvalidRequest
from compilespec.runtime.engine import Engine
from compilespec.runtime.sampling_params import SamplingParams
from tests.support.fake_executor import FakeExecutor, engine_over, geometry, toy_decode

GOOD = [3, 1, 4, 1, 5]
EXPECTED = toy_decode(GOOD, 16, 259)


@pytest.fixture
def engine() -> Engine:
    return engine_over(FakeExecutor(), plan={"method": "toy"}, graphs={"decode": "graph"})


@pytest.mark.parametrize(
    "prompt",
    [
        GOOD,
        tuple(GOOD),
        torch.tensor(GOOD),
        torch.tensor(GOOD, dtype=torch.int32),
        np.array(GOOD),
        list(np.array(GOOD)),
    ],
    ids=lambda p: type(p).__name__,
)
def test_ids_come_in_many_forms(engine, prompt):
    (alone,) = engine.generate(prompt)
    (batched,) = engine.generate([prompt])
    assert alone.token_ids == batched.token_ids == EXPECTED
    assert alone.prompt_token_ids == GOOD
    assert all(type(token) is int for token in alone.prompt_token_ids)
    assert engine.submit(prompt).prompt_token_ids == tuple(GOOD)


@pytest.mark.parametrize("tensors", [False, True], ids=["lists", "tensors"])
def test_what_a_tokenizer_returns_is_taken_as_it_is(engine, tensors):
    """One text's ids, or a batch of rows; a mask that hides nothing is no matter."""
    rows = torch.tensor if tensors else list
    one = BatchEncoding({"input_ids": rows(GOOD), "attention_mask": rows([1] * 5)})
    two = BatchEncoding({"input_ids": rows([GOOD, GOOD]), "attention_mask": rows([[1] * 5] * 2)})
    assert [o.token_ids for o in engine.generate(one)] == [EXPECTED]
    assert [o.token_ids for o in engine.generate(two)] == [EXPECTED, EXPECTED]
    assert [o.token_ids for o in engine.generate([one, GOOD])] == [EXPECTED, EXPECTED]
    assert engine.submit(one).prompt_token_ids == tuple(GOOD)
    assert engine.encode({"input_ids": rows([GOOD])}) == GOOD


BAD_PROMPTS = [
    ([], "empty"),
    ("", "empty"),
    (list(range(96)), "at most 95"),
    ([1, 259], "token 1 is 259"),
    ([-1], "token 0 is -1"),
    ("text", "no tokenizer"),
    ([1, "a"], "'a'"),
    ([1.5], "1.5"),
    ([True], "True"),
    (torch.tensor([[1, 2]]), "2 dimensions"),
    (torch.tensor([0.5]), "0.5"),
    (None, "prompt is None"),
    ({"ids": [1]}, "a dict without input_ids"),
    ({"input_ids": [[1], [2]]}, "2 rows of input_ids"),
    ({"input_ids": [[1, 0]], "attention_mask": [[1, 0]]}, "hides 1 of the prompts' tokens"),
    (b"hi", r"prompt\.decode"),
    (bytearray(b"hi"), r"prompt\.decode"),
    ([{"role": "user", "content": "hi"}], r"give engine\.chat\(messages\)"),
    ({"role": "user", "content": "hi"}, r"give engine\.chat\(messages\)"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "no tokenizer"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_spares_the_others(engine, prompt, message):
    with pytest.raises(InvalidRequest, match=message) as raised:
        engine.submit(prompt)
    assert "\n" not in str(raised.value)
    outputs = engine.generate([GOOD, prompt, GOOD])
    assert [o.token_ids for o in outputs] == [EXPECTED, [], EXPECTED]
    assert outputs[1].finish_reason == "error"
    assert re.search(message, str(outputs[1].error))
    deltas = list(engine.stream([prompt, GOOD]))
    assert deltas[0].finish_reason == "error"
    assert deltas[-1].output.token_ids == EXPECTED


@pytest.mark.parametrize(
    "prompt",
    ["", "text", [300], torch.tensor([0.5]), None, 7, b"hi", [{"role": "user", "content": "hi"}]],
)
def test_a_single_bad_prompt_raises(engine, prompt):
    with pytest.raises(InvalidRequest):
        engine.generate(prompt)
    with pytest.raises(InvalidRequest):
        engine.stream(prompt)  # before the first delta is asked for
    assert not engine.has_work


def test_no_prompts_give_no_outputs(engine):
    assert engine.generate([]) == []
    assert list(engine.stream([])) == []


def test_longest_prompt_gives_one_token(engine):
    (output,) = engine.generate(list(range(95)))
    assert output.token_ids == toy_decode(list(range(95)), 1, 259)
    assert (output.finish_reason, output.emitted_per_step) == ("length", [])
    assert output.acceptance_length == 0.0


def test_one_params_per_prompt(engine):
    params = [SamplingParams(max_new_tokens=n) for n in (1, 5)]
    assert [len(o.token_ids) for o in engine.generate([GOOD, GOOD], params)] == [1, 5]
    with pytest.raises(InvalidRequest, match="expected one SamplingParams or 3"):
        engine.generate([GOOD] * 3, params)


WRONG_PARAMS = [
    ({"max_new_tokens": 3}, r"got a dict; write SamplingParams\(\*\*params\)"),
    (None, "got None; write SamplingParams"),
    (7, "got an int; write SamplingParams"),
]


@pytest.mark.parametrize(("params", "words"), WRONG_PARAMS, ids=["dict", "None", "int"])
def test_what_is_no_params_is_named_and_spares_the_others(engine, params, words):
    good, bad = engine.generate([GOOD, GOOD], [SamplingParams(), params])
    assert (good.token_ids, bad.token_ids, bad.finish_reason) == (EXPECTED, [], "error")
    assert re.search(f"params: expected SamplingParams, {words}", str(bad.error))
    with pytest.raises(InvalidRequest, match=words):
        engine.generate(GOOD, [params])
    if params is not None:
        for call in (engine.generate, engine.stream, engine.submit):
            with pytest.raises(InvalidRequest, match=words):
                call(GOOD, params)
    assert not engine.has_work


def test_params_keep_what_was_checked(engine):
    bias = {5: 100.0}
    params = SamplingParams(max_new_tokens=3, logit_bias=bias)
    bias[500] = 2.0
    request = engine.submit(GOOD, params)
    params.logit_bias[500] = 2.0
    assert request.params.logit_bias == {5: 100.0}
    with pytest.raises(InvalidRequest, match="logit_bias: expected ids from 0 to 258, got 500"):
        engine.submit(GOOD, params)
    engine.abort(request)


def test_what_was_not_compiled_in_is_refused(engine):
    params = SamplingParams(prompt_logprobs=1)
    with pytest.raises(InvalidRequest, match="prompt_logprobs=True"):
        engine.submit(GOOD, params)
    with pytest.raises(InvalidRequest):
        engine.generate([GOOD, GOOD], params)  # the call is at fault, not one prompt
    good, bad = engine.generate([GOOD, GOOD], [SamplingParams(), params])
    assert (good.token_ids, bad.finish_reason) == (EXPECTED, "error")


def test_sampling_filters_change_nothing_when_greedy(engine):
    params = SamplingParams(top_k=5, top_p=0.5, min_p=0.1, seed=7)
    (output,) = engine.generate(GOOD, params)
    assert (output.token_ids, output.seed) == (EXPECTED, 7)
    assert isinstance(engine.generate(GOOD)[0].seed, int)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.0},
        {"max_new_tokens": True},
        {"min_new_tokens": 17},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"n": 0},
        {"stop": ""},
        {"stop": [""]},
        {"stop": [3]},
        {"stop": 3},
        {"stop_token_ids": 3},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"allowed_token_ids": []},
        {"logit_bias": [1]},
        {"ignore_eos": 1},
    ],
    ids=str,
)
def test_impossible_params_fail_when_made(fields):
    with pytest.raises(InvalidRequest, match=next(iter(fields))) as raised:
        SamplingParams(**fields)
    assert "\n" not in str(raised.value)


def test_params_are_plain_frozen_data():
    import copy
    import pickle

    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, stop=()).stop == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_stop_ids_outside_the_vocabulary(engine):
    with pytest.raises(InvalidRequest, match="0 to 258, got 259"):
        engine.submit(GOOD, SamplingParams(stop_token_ids=[259]))


def test_a_request_larger_than_the_cache_is_refused():
    engine = Engine(FakeExecutor(geometry(num_blocks=5)))
    with pytest.raises(InvalidRequest, match="kv_cache_tokens of at least 48"):
        engine.submit([1] * 10, SamplingParams(max_new_tokens=30))
    (output,) = engine.generate([1] * 10, SamplingParams(max_new_tokens=20))
    assert len(output.token_ids) == 20


def test_closed_engine_says_so():
    executor = FakeExecutor()
    with Engine(executor) as engine:
        request = engine.submit(GOOD)
        stream = engine.stream([GOOD])
    assert executor.closed
    assert request.finish_reason == "aborted"
    engine.close()
    calls = (
        lambda: engine.generate(GOOD),
        lambda: engine.stream(GOOD),
        lambda: engine.submit(GOOD),
        lambda: engine.abort(request),
        lambda: next(stream),
        engine.step,
        engine.__enter__,
    )
    for call in calls:
        with pytest.raises(EngineClosed):
            call()
    assert engine.stats().num_emitted == 0


def test_closing_while_streaming_ends_the_stream(engine):
    stream = engine.stream([GOOD, GOOD])
    next(stream)
    engine.close()
    assert [delta.finish_reason for delta in stream][-1] == "aborted"


def test_plan_graphs_and_recompiles_come_from_the_maker(engine):
    assert engine.plan() == {"method": "toy"}
    assert engine.graphs == {"decode": "graph"}
    assert engine.stats().num_recompiles == 0
    assert engine_over(FakeExecutor(), count_recompiles=lambda: 3).stats().num_recompiles == 3


def test_steps_are_counted_by_bucket():
    engine = engine_over(FakeExecutor(), buckets=(1, 4))
    params = [SamplingParams(max_new_tokens=n) for n in (20, 20, 1)]
    engine.generate([GOOD, [1], [2]], params)
    stats = engine.stats()
    assert set(stats.num_decodes_by_bucket) <= {1, 4}
    assert stats.num_decodes_by_bucket[4] > 0
    assert stats.decode_ms > 0
    assert stats.prefill_ms > 0
