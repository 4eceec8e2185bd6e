"""Clients that people have, over the toy program; `make test-clients` installs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from compilespec.serving import ServerOptions
from tests.support.live_server import Live, live, toy_engine

HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"type": "function", "function": {
    "name": "look", "description": "Looks.",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
}}  # fmt: skip
SAID = (
    '<think>hm</think>I look.<tool_call>\n{"name": "look", "arguments": {"x": "{ö}"}}\n</tool_call>'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
CALLS = [("look", {"x": "{ö}"}), ("look", {})]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(toy_engine()) as server:
        yield server


@pytest.fixture(scope="module")
def agent() -> Iterator[Live]:
    options = ServerOptions(model_names=("toy",), tool_format="hermes", reasoning_parser="think")
    with live(toy_engine(SAID), options) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(server: Live) -> str:
    """The greedy answer, by the openai client."""
    with server.openai() as client:
        told = client.chat.completions.create(
            model="toy", messages=HELLO, temperature=0, max_tokens=30
        )
    return str(told.choices[0].message.content)


# --- litellm ---


@pytest.fixture(scope="module")
def litellm() -> Any:
    module = pytest.importorskip("litellm", reason="make test-clients installs it")
    module.num_retries = 0
    return module


def ours(server: Live, **more: Any) -> dict[str, Any]:
    return {"model": "openai/toy", "api_base": f"{server.url}/v1", "api_key": "none", **more}


def test_litellm_has_the_answer_whole_and_in_parts(litellm: Any, server: Live, wanted: str) -> None:
    asked = ours(server, messages=HELLO, temperature=0, max_tokens=30)
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == wanted
    assert whole.usage.completion_tokens == 30
    parts = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(parts)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted
    told = litellm.text_completion(**ours(server, model="text-completion-openai/toy"),
                                   prompt="abc", temperature=0, max_tokens=5)  # fmt: skip
    assert told.choices[0].text


def test_litellm_has_calls_whole_and_in_parts(litellm: Any, agent: Live) -> None:
    asked = ours(agent, messages=HELLO, tools=[LOOK])
    message = litellm.completion(**asked).choices[0].message
    assert (message.content, message.reasoning_content) == ("I look.", "hm")
    assert [_call(one.function) for one in message.tool_calls] == CALLS
    chunks = list(litellm.completion(**asked, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message
    assert [_call(one.function) for one in built.tool_calls] == CALLS


def test_litellm_speaks_responses_and_messages(litellm: Any, server: Live, wanted: str) -> None:
    told = litellm.responses(**ours(server), input=HELLO, temperature=0, max_output_tokens=30)
    assert told.output[-1].content[0].text == wanted
    whole = litellm.completion(
        model="anthropic/toy", api_base=server.url, api_key="none", messages=HELLO, temperature=0,
        max_tokens=30,
    )  # fmt: skip
    assert whole.choices[0].message.content == wanted


# --- langchain ---


@pytest.fixture(scope="module")
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="make test-clients installs it")


def chat(langchain: Any, server: Live, **more: Any) -> Any:
    return langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="toy", max_retries=0, **more
    )


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_has_the_answer(
    langchain: Any, server: Live, wanted: str, responses: bool
) -> None:
    model = chat(langchain, server, temperature=0, max_tokens=30, use_responses_api=responses)
    assert model.invoke("hello").text == wanted
    assert "".join(part.text for part in model.stream("hello")) == wanted


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_has_the_calls(langchain: Any, agent: Live, responses: bool) -> None:
    model = chat(langchain, agent, use_responses_api=responses).bind_tools([LOOK])
    told = model.invoke("hello")
    assert [(one["name"], one["args"]) for one in told.tool_calls] == CALLS
    parts = list(model.stream("hello"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == CALLS
    answered = [
        ("user", "hello"), told, *({"role": "tool", "tool_call_id": one["id"], "content": "a lake"}
                                   for one in told.tool_calls),
    ]  # fmt: skip
    assert model.invoke(answered).tool_calls


def _call(function: Any) -> tuple[str, Any]:
    return function.name, json.loads(function.arguments)
