"""Anthropic's protocol over the toy program, by the anthropic client."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest

from compilespec.serving import ServerOptions
from compilespec.serving.messages import MessagesRequest, _as_chat, _usage
from tests.support.live_server import Live, live, toy_engine

HELLO = [{"role": "user", "content": "hello"}]
BRIEF = "be brief, and then be briefer still"
TOOL = {"name": "look", "description": "Looks.",
        "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}  # fmt: skip
SAID = (
    '<think>hm, ä</think>I look.<tool_call>\n{"name": "look", "arguments": {"x": "{ö}"}}\n'
    '</tool_call><tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)


def client_of(server: Live, key: str = "none") -> Any:
    return anthropic.Anthropic(
        base_url=server.url, api_key=key, max_retries=0,
        http_client=httpx2.Client(timeout=30, trust_env=False),
    )  # fmt: skip


@contextlib.contextmanager
def saying(text: str) -> Iterator[Any]:
    options = ServerOptions(
        model_names=("toy",), tool_format="hermes", reasoning_parser="think", api_keys=("secret",)
    )
    with live(toy_engine(text), options) as server, client_of(server, "secret") as client:
        yield client


@pytest.fixture(scope="module")
def agent() -> Iterator[Any]:
    with saying(SAID) as client:
        yield client


def test_an_answer_is_that_of_chat_completions() -> None:
    with live(toy_engine()) as server, server.openai() as openai, client_of(server) as client:
        messages = [{"role": "system", "content": BRIEF}, *HELLO]
        chat = openai.chat.completions.create(
            model="toy", messages=messages, temperature=0, max_tokens=30
        )
        asked = {"model": "toy", "messages": HELLO, "system": BRIEF,
                 "extra_body": {"temperature": 0}, "max_tokens": 30}  # fmt: skip
        whole = client.messages.create(**asked)
        assert [block.text for block in whole.content] == [chat.choices[0].message.content]
        ends = {"length": "max_tokens", "stop": "end_turn"}
        assert whole.stop_reason == ends[chat.choices[0].finish_reason]
        used = whole.usage
        assert used.output_tokens == chat.usage.completion_tokens
        assert used.input_tokens + used.cache_read_input_tokens == chat.usage.prompt_tokens
        count = client.messages.count_tokens(
            model="toy", messages=HELLO, system=[{"type": "text", "text": BRIEF}]
        )
        assert count.input_tokens == chat.usage.prompt_tokens
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens


def test_thinking_and_calls_are_blocks(agent: Any) -> None:
    asked = {"model": "toy", "messages": HELLO, "max_tokens": 200, "tools": [TOOL]}
    whole = agent.messages.create(**asked)
    told = [block.model_dump(exclude_none=True) for block in whole.content]
    ids = [block.pop("id") for block in told if block["type"] == "tool_use"]
    assert [block["type"] for block in told] == ["thinking", "text", "tool_use", "tool_use"]
    assert told[0]["thinking"] == "hm, ä"
    assert told[1]["text"] == "I look."
    assert [block["input"] for block in told[2:]] == [{"x": "{ö}"}, {}]
    assert len(set(ids)) == 2
    assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
    with agent.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    streamed = [block.model_dump(exclude_none=True) for block in final.content]
    for block in streamed:
        block.pop("id", None)
    assert streamed == told


def test_a_stop_sequence_is_named() -> None:
    with saying("one two three") as client:
        whole = client.messages.create(
            model="toy", messages=HELLO, max_tokens=50, stop_sequences=["thr", "zzz"]
        )
        assert whole.content[0].text == "one two "
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "thr")


def test_blocks_become_messages_of_a_chat() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    read = _as_chat(MessagesRequest(
        max_tokens=9, thinking={"type": "disabled"},
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "image", "source": source},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "i", "name": "look", "input": {"x": "1"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "i", "content": "r", "is_error": True},
                {"type": "text", "text": "c"},
            ]},
        ],
    ))  # fmt: skip
    call = {"id": "i", "type": "function", "function": {"name": "look", "arguments": {"x": "1"}}}
    assert read.messages == [
        {"role": "user", "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]},
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "i", "content": "Error: r"},
        {"role": "user", "content": "c"},
    ]  # fmt: skip
    assert read.chat_template_kwargs == {"enable_thinking": False}
    assert (read.tool_choice, read.parallel_tool_calls) == ("required", False)
    assert read.tools is not None
    assert read.tools[0]["function"]["parameters"] == TOOL["input_schema"]


def test_tokens_that_were_found_count_apart() -> None:
    used = _usage(40, 16, 3)
    assert (used["input_tokens"], used["cache_read_input_tokens"], used["output_tokens"]) == (
        24, 16, 3,
    )  # fmt: skip


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": 0}, "^max_tokens: "),
    "a field": ({"container": "x"}, "no field 'container'"),
    "a tool of a server": ({"tools": [{"type": "web_search"}]}, "tools that a server runs"),
    "a choice": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "^tool_choice: expected"),
    "a choice of no tool": ({"tool_choice": {"type": "any"}}, "there are no tools"),
    "a role": ({"messages": [{"role": "system", "content": "x"}]}, r"^messages\.0: expected a"),
    "a block": ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
                r"^messages\.0\.content\.0: blocks of type 'document'"),
    "an image elsewhere": (
        {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
        "nothing is downloaded"),
    "given text": (
        {"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "/v1/completions"),
    "thinking": ({"thinking": {"type": "deep"}}, "^thinking: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_in_anthropics_form(agent: Any, name: str) -> None:
    more, message = BAD[name]
    body = {"model": "toy", "messages": HELLO, "max_tokens": 9, **more}
    with pytest.raises(anthropic.BadRequestError) as raised:
        agent.post("/v1/messages", body=body, cast_to=object)
    error: Any = raised.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert re.search(message, error["error"]["message"]), error


def test_errors_by_their_status(agent: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude'; served: toy"):
        agent.messages.create(model="claude", messages=HELLO, max_tokens=3)
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        agent.with_options(api_key="wrong").messages.create(
            model="toy", messages=HELLO, max_tokens=3
        )
