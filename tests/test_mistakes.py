"""Mistakes that users make: an error of compilespec's, in one line that names the cure, at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compilespec import SamplingParams
from compilespec.errors import InvalidRequest, SpecError
from compilespec.runtime.engine import Engine
from tests.fake_executor import FakeExecutor

TIME_LIMIT_S = 2.0  # of this process: other tests may share the cores
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(FakeExecutor()) as engine:
        yield engine


@contextlib.contextmanager
def within_the_limit() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < TIME_LIMIT_S


# What is done with an engine, the class of the error, what its line says.
WITH_AN_ENGINE: dict[str, tuple[Callable[[Engine], Any], type[SpecError], str]] = {
    "chat messages": (
        lambda e: e.generate(CHAT), InvalidRequest,
        r"give engine\.tokenizer\.apply_chat_template\(messages, add_generation_prompt=True\)$",
    ),
    "a padded batch": (
        lambda e: e.generate({"input_ids": [[3, 0]], "attention_mask": [[1, 0]]}), InvalidRequest,
        "without padding",
    ),
    "bytes": (lambda e: e.generate(b"hi"), InvalidRequest, r"give prompt\.decode\(\)$"),
    "a field of SamplingParams": (
        lambda e: e.generate([3], max_new_tokens=5), InvalidRequest,
        r"put it into SamplingParams\(max_new_tokens=5\)$",
    ),
    "another project's field": (
        lambda e: e.stream([3], max_tokens=5), InvalidRequest,
        r"put it into SamplingParams\(max_new_tokens=5\)$",
    ),
    "a field that means another thing": (
        lambda e: e.submit([3], do_sample=True), InvalidRequest,
        r"did you mean, in SamplingParams, temperature \(0 is greedy",
    ),
    "transformers' keywords": (
        lambda e: e.generate(input_ids=[[3]], attention_mask=[[1]]), InvalidRequest,
        r"did you mean prompts \(a tokenizer's output is taken as it is\)\?$",
    ),
    "params by another name": (
        lambda e: e.generate([3], sampling_params=SamplingParams()), InvalidRequest,
        r"did you mean params\?$",
    ),
    "an unknown keyword": (
        lambda e: e.submit([3], colour="red"), InvalidRequest,
        "it takes prompt, params, priority$",
    ),
    "positional parameters": (lambda e: SamplingParams(64), InvalidRequest, "max_new_tokens=64"),
    "max_tokens": (
        lambda e: SamplingParams(max_tokens=5), InvalidRequest, r"did you mean max_new_tokens\?$",
    ),
    "max_length": (
        lambda e: SamplingParams(max_length=5), InvalidRequest,
        r"did you mean max_new_tokens \(which does not count the prompt\)\?$",
    ),
    "top_n": (lambda e: SamplingParams(top_n=5), InvalidRequest, r"did you mean top_k\?$"),
    "stop_strings": (
        lambda e: SamplingParams(stop_strings=["a"]), InvalidRequest, r"did you mean stop\?$",
    ),
    "a slip": (lambda e: SamplingParams(temprature=1), InvalidRequest, "did you mean temperature"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_AN_ENGINE)
def test_with_an_engine(engine: Engine, name: str) -> None:
    call, kind, says = WITH_AN_ENGINE[name]
    with within_the_limit(), pytest.raises(kind, match=says) as caught:
        call(engine)
    assert "\n" not in str(caught.value)
    assert not engine.has_work
