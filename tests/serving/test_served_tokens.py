"""Over a model that computes: the server gives the engine's own tokens, floats and guided text."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Iterator
from typing import Any

import pytest

import compilespec
from compilespec import SamplingParams
from compilespec.serving import ServerOptions
from tests.support.live_server import Live, live
from tests.support.models import VOCAB, tiny_target
from tests.support.toy_tokenizer import byte_level_tokenizer

TEXT = (string.ascii_letters + string.digits + string.punctuation + " \n")[: VOCAB - 1]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ (tools or [])|length }}:"
GREEDY = SamplingParams(max_new_tokens=14, logprobs=3, prompt_logprobs=3, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=14, temperature=0.9, top_p=0.8, seed=7, n=3)
PROMPTS = ([5, 6, 7], list(range(20, 53)), [90, 3, 90, 3, 90])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Live, dict[str, Any]]]:
    """A server, and what its engine said before it was served."""
    model = tiny_target("llama", num_layers=2)
    spelled: list[Any] = [char.encode() for char in TEXT]
    spelled.insert(2, "<eos>")  # the model's own
    tokenizer = byte_level_tokenizer(spelled, eos="<eos>")
    tokenizer.chat_template = TEMPLATE
    engine = compilespec.compile(
        model, "ngram",
        num_draft_tokens=3, backend="eager", max_seq_len=128, max_batch_size=4,
        prompt_logprobs=True, tokenizer=tokenizer,
    )  # fmt: skip
    said = {
        "greedy": [engine.generate(prompt, GREEDY)[0] for prompt in PROMPTS],
        "drawn": engine.generate(PROMPTS[0], DRAWN),
    }
    engine.reset_prefix_cache()
    with live(engine, ServerOptions(model_names=("tiny",))) as server:
        yield server, said


def test_many_at_once_have_the_engines_tokens(served: Any) -> None:
    server, said = served
    body = {"max_tokens": 14, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    async def ask() -> list[list[int]]:
        import httpx2

        async with httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            jobs = [
                client.post("/v1/completions", json={**body, "prompt": PROMPTS[i % 3]})
                for i in range(9)
            ]
            answers = await asyncio.gather(*jobs)
        return [answer.json()["choices"][0]["token_ids"] for answer in answers]

    assert asyncio.run(ask()) == [said["greedy"][i % 3].token_ids for i in range(9)]


def test_seeds_and_samples(served: Any) -> None:
    server, said = served
    body = {"prompt": PROMPTS[0], "max_tokens": 14, "temperature": 0.9, "top_p": 0.8, "seed": 7,
            "n": 3, "return_token_ids": True}  # fmt: skip
    with server.client() as client:
        choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [o.token_ids for o in said["drawn"]]


def test_logprobs_as_evaluations_read_them(served: Any) -> None:
    """The chosen token stands among the best of its place, with the same float, also in echoes."""
    server, said = served
    body = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    with server.client() as client:
        for prompt, output in zip(PROMPTS, said["greedy"], strict=True):
            told = client.post("/v1/completions", json={**body, "prompt": prompt}).json()
            logprobs = told["choices"][0]["logprobs"]
            values, best = logprobs["token_logprobs"], logprobs["top_logprobs"]
            assert len(values) == len(prompt) + 1
            assert values[0] is None
            assert best[0] is None
            noted = [*output.prompt_logprobs[1:], output.logprobs[0]]
            assert values[1:] == [entry.logprob for entry in noted]
            for value, top, entry in zip(values[1:], best[1:], noted, strict=True):
                assert value in top.values()
                is_greedy = value == max(top.values())
                assert is_greedy == (entry.token_id == next(iter(entry.top)))
            none = client.post("/v1/completions", json={**body, "prompt": prompt, "max_tokens": 0})
            assert none.json()["choices"][0]["logprobs"]["token_logprobs"] == values[:-1]


def test_chat_logprobs_are_the_engines(served: Any) -> None:
    server, _ = served
    with server.openai() as client:
        choice = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "abc"}], temperature=0,
            max_tokens=9, logprobs=True, top_logprobs=2,
        ).choices[0]  # fmt: skip
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == 2
        assert one.logprob == max(top.logprob for top in one.top_logprobs)
        assert bytes(one.bytes).decode() == one.token


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_formats_hold(served: Any) -> None:
    server, _ = served
    with server.openai() as client:

        def ask(**fields: Any) -> Any:
            asked = {"temperature": 1, "seed": 3, "max_tokens": 60, **fields}
            messages = [{"role": "user", "content": "go"}]
            return client.chat.completions.create(model="tiny", messages=messages, **asked)

        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        text = ask(response_format=schema).choices[0].message.content
        assert set(json.loads(text)) == {"a", "b"}
        assert " " not in text
        text = ask(response_format={"type": "regex", "regex": "[ab]{3}c"}).choices[0].message
        assert text.content.endswith("c")
        assert len(text.content) == 4
        options = ["left", "right"]
        text = ask(response_format={"type": "choice", "choice": options}).choices[0].message
        assert text.content in options


def test_a_call_that_must_be_is_guided(served: Any) -> None:
    server, _ = served
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"
    ]
    with server.openai() as client:
        for choice in ("required", {"type": "function", "function": {"name": "g"}}):
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "go"}], tools=tools,
                tool_choice=choice, temperature=1, seed=5, max_tokens=100,
                response_format={"type": "text"},
            ).choices[0]  # fmt: skip
            assert answer.finish_reason == "tool_calls", answer
            for call in answer.message.tool_calls:
                assert call.function.name in "fg"
                assert set(json.loads(call.function.arguments)) == {"a", "b"}
            if choice != "required":
                assert [call.function.name for call in answer.message.tool_calls] == ["g"]


def test_cached_tokens_are_told(served: Any) -> None:
    server, _ = served
    body = {"prompt": list(range(40)) * 2, "max_tokens": 2, "temperature": 0}
    with server.client() as client:
        first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached[0] < 40 < cached[1] < 80
