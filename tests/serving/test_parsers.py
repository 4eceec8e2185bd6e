"""Tool calls and reasoning, however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compilespec.serving import ServerOptions
from compilespec.serving.parsers.calls import Hermes, Llama
from compilespec.serving.parsers.parts import Parser, Parts, Plain
from compilespec.serving.parsers.reasoning import Think
from tests.support.live_server import Live, live, toy_engine

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é<"}}\n</tool_call>'
CASES: dict[str, tuple[Callable[[], Parser], str, str, str, list[tuple[str, Any]]]] = {
    "plain": (Plain, "a <b", "a <b", "", []),
    "hermes, none": (Hermes, "1 < 2 <tool", "1 < 2 <tool", "", []),
    "hermes, one": (Hermes, CALL, "", "", [("f", {"x": "é<"})]),
    "hermes, two after text": (
        Hermes, f"Well.\n{CALL}\n{CALL}\n", "Well.\n", "", [("f", {"x": "é<"})] * 2,
    ),
    "hermes, broken": (
        Hermes, "<tool_call>{x}</tool_call>.", "<tool_call>{x}</tool_call>.", "", [],
    ),
    "hermes, cut": (Hermes, '<tool_call>{"name"', '<tool_call>{"name"', "", []),
    "hermes, no end": (Hermes, '<tool_call>{"name": "g"}', "", "", [("g", {})]),
    "llama": (Llama, '{"name": "f", "parameters": {"x": 1}}', "", "", [("f", {"x": 1})]),
    "llama, two": (
        Llama,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"y": []}}',
        "", "", [("f", {}), ("g", {"y": []})],
    ),
    "llama, other JSON": (Llama, ' {"x": 1}', ' {"x": 1}', "", []),
    "llama, text": (Llama, "<|pyth is {", "<|pyth is {", "", []),
    "thought": (
        lambda: Think(Plain(), is_begun=False), "\n<think>\nhm </\n</think>\n\nYes", "Yes",
        "\nhm </\n", [],
    ),
    "no thought": (lambda: Think(Plain(), is_begun=False), " <thin air", " <thin air", "", []),
    "begun thought": (lambda: Think(Plain(), is_begun=True), "hm</think>Yes", "Yes", "hm", []),
    "only thought": (lambda: Think(Plain(), is_begun=True), "hm</thi", "", "hm</thi", []),
    "thought, then a call": (
        lambda: Think(Hermes(), is_begun=False), f"<think>hm</think>\n{CALL}", "", "hm",
        [("f", {"x": "é<"})],
    ),
    "nothing": (lambda: Think(Hermes(), is_begun=False), "", "", "", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_are_the_same_however_the_text_is_cut(name: str) -> None:
    make, text, content, reasoning, calls = CASES[name]
    draw = random.Random(0)
    for most in (10_000, 1, 2, 3, 7, 7, 7):
        parser, parts, at = make(), Parts(), 0
        while at < len(text):
            size = draw.randint(1, most)
            parts += parser.add(text[at : at + size])
            at += size
        parts += parser.finish()
        assert (parts.content, parts.reasoning) == (content, reasoning)
        assert [(call.name, json.loads(call.arguments)) for call in parts.calls] == calls
        assert len({call.id for call in parts.calls}) == len(calls)


def test_content_does_not_wait_for_what_cannot_be_a_tag() -> None:
    parser = Hermes()
    assert parser.add("one <").content == "one "
    assert parser.add("two").content == "<two"


# --- by the server ---

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASK: dict[str, Any] = {
    "model": "toy", "messages": [{"role": "user", "content": "call"}], "temperature": 0,
    "tools": [TOOL],
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Its template has `<tool_call>`, so that its calls are Hermes's."""
    options = ServerOptions(model_names=("toy",), reasoning_parser="think")
    with live(toy_engine(f"<think>Shall I?</think>\n\nI do.\n{CALL}"), options) as server:
        yield server


def test_calls_and_reasoning_by_the_openai_client(server: Live) -> None:
    with server.openai() as client:
        choice = client.chat.completions.create(**ASK).choices[0]
        message = choice.message
        assert choice.finish_reason == "tool_calls"
        assert (message.content, message.reasoning_content) == ("I do.\n", "Shall I?")
        function = message.tool_calls[0].function
        assert (function.name, json.loads(function.arguments)) == ("f", {"x": "é<"})
        content = reasoning = ""
        calls = []
        for chunk in client.chat.completions.create(**ASK, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            calls += delta.tool_calls or []
        assert (content, reasoning) == (message.content, message.reasoning_content)
        assert [(call.index, call.function.name) for call in calls] == [(0, "f")]
        assert calls[0].function.arguments == function.arguments
        assert chunk.choices[0].finish_reason == "tool_calls"
        answered = [
            *ASK["messages"], message.model_dump(),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"},
        ]  # fmt: skip
        again = client.chat.completions.create(**{**ASK, "messages": answered, "max_tokens": 1})
        assert again.usage.prompt_tokens > choice.message.content.count("")


def test_tools_are_left_alone_where_the_request_says_so(server: Live) -> None:
    with server.openai() as client:
        choice = client.chat.completions.create(**ASK, tool_choice="none").choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.content == f"I do.\n{CALL}"
        assert choice.message.tool_calls is None


def test_a_model_without_a_known_form_is_named() -> None:
    engine = toy_engine("x")
    engine.tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"  # type: ignore[union-attr]
    with live(engine) as server, server.client() as client:
        answer = client.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 400
        assert "--tool-parser" in answer.json()["error"]["message"]
