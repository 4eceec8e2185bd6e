"""Tool calls and reasoning, however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from compilespec.runtime.guides import Vocabulary
from compilespec.serving import ServerOptions
from compilespec.serving.errors import ApiError
from compilespec.serving.params import read_guide
from compilespec.serving.parsers.calls import Calls, Named, read_calls
from compilespec.serving.parsers.formats import FORMATS, LIST, REASONING
from compilespec.serving.parsers.parts import First, Parser, Parts, Plain
from compilespec.serving.parsers.reasoning import Think
from compilespec.serving.protocol import ChatRequest
from compilespec.serving.tools import read_tools
from tests.support.live_server import Live, live, toy_engine, toy_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é<"}}\n</tool_call>'
NAMES = ("f", "g")
BARE = '{"name": "f", "arguments": {"x": 1}}'
FENCED = f"```json\n{BARE}\n```"
WRITE = '{"name": "write", "arguments": {"text": "%s"}}'
TAGGED = "<tool_call>\n%s\n</tool_call>"


def hermes(names: Any = ()) -> Parser:
    return Calls(FORMATS["hermes"], dict.fromkeys(names))


def llama(names: Any = ()) -> Parser:
    return Calls(FORMATS["llama"], dict.fromkeys(names))


def named(kind: Callable[..., Parser]) -> Callable[[], Parser]:
    return lambda: kind(NAMES)


def thinking(following: Parser, *, is_begun: bool) -> Parser:
    return Think(following, REASONING["think"], is_begun=is_begun)


def written(text: str) -> tuple[str, Any]:
    return "write", {"text": text}


CASES: dict[str, tuple[Callable[[], Parser], str, str, str, list[tuple[str, Any]]]] = {
    "plain": (Plain, "a <b", "a <b", "", []),
    "hermes, none": (hermes, "1 < 2 <tool", "1 < 2 <tool", "", []),
    "hermes, one": (hermes, CALL, "", "", [("f", {"x": "é<"})]),
    "hermes, two after text": (
        hermes, f"Well.\n{CALL}\n{CALL}\n", "Well.\n", "", [("f", {"x": "é<"})] * 2,
    ),
    "hermes, broken": (
        hermes, "<tool_call>{x}</tool_call>.", "<tool_call>{x}</tool_call>.", "", [],
    ),
    "hermes, cut": (hermes, '<tool_call>{"name"', '<tool_call>{"name"', "", []),
    "hermes, no end": (hermes, '<tool_call>{"name": "g"}', "", "", [("g", {})]),
    "llama": (named(llama), '{"name": "f", "parameters": {"x": 1}}', "", "", [("f", {"x": 1})]),
    "llama, two": (
        named(llama),
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"y": []}}',
        "", "", [("f", {}), ("g", {"y": []})],
    ),
    "llama, other JSON": (named(llama), ' {"x": 1}', ' {"x": 1}', "", []),
    "llama, text": (named(llama), "<|pyth is {", "<|pyth is {", "", []),
    "llama, call of another": (
        named(llama), '{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', "", [],
    ),
    "llama, text before": (
        named(llama), 'So:\n{"type": "function", "name": "f", "parameters": {}}', "So:\n", "",
        [("f", {})],
    ),
    "a stray tag": (
        hermes, "<tool_call>\nso: " + TAGGED % (WRITE % "x"), "<tool_call>\nso: ", "",
        [written("x")],
    ),
    "tags in a string": (
        hermes, TAGGED % (WRITE % "a <tool_call>{}</tool_call> \\\"}"), "", "",
        [written('a <tool_call>{}</tool_call> "}')],
    ),
    "control characters": (hermes, TAGGED % (WRITE % "a\n\tb"), "", "", [written("a\n\tb")]),
    "no end between calls": (
        hermes, f"<tool_call>\n{WRITE % 1}\n{TAGGED % (WRITE % 2)}", "", "",
        [written("1"), written("2")],
    ),
    "two between tags": (
        hermes, TAGGED % f"{WRITE % 1},\n{WRITE % 2}", "", "", [written("1"), written("2")],
    ),
    "a list between tags": (
        hermes, TAGGED % f"[{WRITE % 1}, {WRITE % 2}]", "", "", [written("1"), written("2")],
    ),
    "text between calls": (
        hermes, f"{CALL}\n \nand\n{CALL}", "and\n", "", [("f", {"x": "é<"})] * 2,
    ),
    "white space before a call": (hermes, f"\n {CALL}", "", "", [("f", {"x": "é<"})]),
    "half a character": (hermes, TAGGED % (WRITE % r"\ud83d"), "", "", [written("\ufffd")]),
    "a character in halves": (hermes, TAGGED % (WRITE % r"\ud83d\ude00"), "", "", [written("😀")]),
    "too deep": (
        hermes, '<tool_call>{"name": "f", "arguments": ' + "[" * 3000,
        '<tool_call>{"name": "f", "arguments": ' + "[" * 3000, "", [],
    ),
    "bare": (named(hermes), BARE, "", "", [("f", {"x": 1})]),
    "bare, no name known": (hermes, BARE, BARE, "", []),
    "bare, name of no tool": (
        named(hermes), BARE.replace("f", "h", 1), BARE.replace("f", "h", 1), "", [],
    ),
    "bare, no arguments": (named(hermes), '{"name": "f"}', '{"name": "f"}', "", []),
    "bare, cut after its arguments": (named(hermes), BARE[:-1], "", "", [("f", {"x": 1})]),
    "bare, cut in its head": (named(hermes), BARE[:20], BARE[:20], "", []),
    "bare, two and text": (
        named(hermes), f"\n {BARE}\n{BARE}\nDone {{}}.", "Done {}.", "", [("f", {"x": 1})] * 2,
    ),
    "bare, after text": (named(hermes), f"I call:\n{BARE}", "I call:\n", "", [("f", {"x": 1})]),
    "bare, in a line": (named(hermes), f"I call: {BARE}", f"I call: {BARE}", "", []),
    "bare, a list": (named(hermes), f"[{BARE},\n{BARE}]", "", "", [("f", {"x": 1})] * 2),
    "bare, end without begin": (
        named(hermes), f"{BARE}\n</tool_call>", "", "", [("f", {"x": 1})],
    ),
    "an answer in JSON": (
        named(hermes), f'{{"calls": [\n{BARE}\n]}}', f'{{"calls": [\n{BARE}\n]}}', "", [],
    ),
    "a list of other things": (named(hermes), f"[{BARE}, 1]", f"[{BARE}, 1]", "", []),
    "fenced": (named(hermes), FENCED, "", "", [("f", {"x": 1})]),
    "fenced, among text": (
        named(hermes), f"So:\n{FENCED}\n{FENCED}\nDone.", "So:\nDone.", "", [("f", {"x": 1})] * 2,
    ),
    "fenced, no label": (
        named(hermes), f"```\n\n  {BARE}```", "", "", [("f", {"x": 1})],
    ),
    "fenced, other JSON": (
        named(hermes), '```json\n{"name": "h"}\n```\n', '```json\n{"name": "h"}\n```\n', "", [],
    ),
    "fenced, code": (
        named(hermes), "a `b`\n```c\n{\n}\n```", "a `b`\n```c\n{\n}\n```", "", [],
    ),
    "the first alone": (
        lambda: First(hermes(NAMES)), f"{CALL}{CALL} and\n{FENCED}", "and\n", "",
        [("f", {"x": "é<"})],
    ),
    "thought": (
        lambda: thinking(Plain(), is_begun=False), "\n<think>\nhm </\n</think>\n\nYes", "Yes",
        "\nhm </\n", [],
    ),
    "no thought": (lambda: thinking(Plain(), is_begun=False), " <thin air", " <thin air", "", []),
    "begun thought": (lambda: thinking(Plain(), is_begun=True), "hm</think>Yes", "Yes", "hm", []),
    "only thought": (lambda: thinking(Plain(), is_begun=True), "hm</thi", "", "hm</thi", []),
    "thought, then a call": (
        lambda: thinking(hermes(), is_begun=False), f"<think>hm</think>\n{CALL}", "", "hm",
        [("f", {"x": "é<"})],
    ),
    "Gemma's thought": (
        lambda: Think(Plain(), REASONING["gemma4"], is_begun=False),
        "<|channel>thought\nhm <|channel\n<channel|>Yes", "Yes", "hm <|channel\n", [],
    ),
    "Mistral's thought": (
        lambda: Think(Plain(), REASONING["mistral"], is_begun=True), "hm[/x[/THINK]\nYes", "Yes",
        "hm[/x", [],
    ),
    "nothing": (lambda: thinking(hermes(), is_begun=False), "", "", "", []),
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


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("null", {}), ('""', {}), ('" "', {}), ("{}", {}), (r'"{\"x\": null}"', {"x": None}),
        ("NaN", None), ('{"x": NaN}', None), ('{"x": 1e999}', None), ("Infinity", None),
        ("[]", None), ("1", None), ('"text"', None), ('"[1]"', None),
        (r'"{\"x\": -Infinity}"', None),
        ('{"x": 12345678901234567890123}', {"x": 12345678901234567890123}),
        ('{"x": ' + "[" * 900_000 + "]" * 900_000 + "}", None),
    ],
)  # fmt: skip
def test_arguments_are_an_object_or_there_is_no_call(given: str, want: Any) -> None:
    calls = read_calls(f'{{"name": "f", "arguments": {given}}}', None)
    assert [json.loads(call.arguments) for call in calls] == ([] if want is None else [want])


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_an_answer_under_a_guide_gives_its_calls(size: int) -> None:
    arguments = '{"x":[1,"}]"],"y":"\\n"}'
    listed = f'[{{"name":"f","arguments":{arguments}}},{{"name":"g","arguments":{{}}}}]'
    cut = arguments[:8]
    for make, text, wanted in (
        (lambda: Named("f"), arguments, [("f", '{"x": [1, "}]"], "y": "\\n"}')]),
        (lambda: Named('a "b"'), "{}", [('a "b"', "{}")]),
        (lambda: Named("f"), cut, [("f", '{"x": [1')]),
        (lambda: Calls(LIST, is_begun=True), listed,
         [("f", '{"x": [1, "}]"], "y": "\\n"}'), ("g", "{}")]),
        (lambda: Calls(LIST, is_begun=True), listed[: listed.index("]")],
         [("f", '{"x": [1, "}')]),
    ):  # fmt: skip
        parser, parts = make(), Parts()
        for at in range(0, len(text), size):
            parts += parser.add(text[at : at + size])
        parts += parser.finish()
        assert [(call.name, call.arguments) for call in parts.calls] == wanted
        assert not parts.content


def test_references_of_a_tool_hold_among_others() -> None:
    """As pydantic writes them."""
    tool = {"type": "function", "function": {"name": "h", "parameters": {
        "$defs": {"Day": {"enum": ["Mo", "Tu"]}}, "type": "object",
        "properties": {"day": {"$ref": "#/$defs/Day"}}, "required": ["day"],
    }}}  # fmt: skip
    for form, text in (
        (None, '[{"name":"h","arguments":{"day":"%s"}}]'),
        (FORM, '<tool_call>\n{"name":"h","arguments":{"day":"%s"}}\n</tool_call>'),
    ):
        choice = "auto" if form else "required"
        asked = ChatRequest(messages=[], tools=[OTHER, tool], tool_choice=choice,
                            response_format=form)  # fmt: skip
        guide = (
            read_tools(asked, service_of("hermes")).reading([]).guide(read_guide(asked))["guide"]
        )
        assert admits(guide, text % "Tu")
        assert not admits(guide, text % "We")


def test_an_answer_in_json_does_not_wait_for_its_end() -> None:
    parser = hermes(NAMES)
    assert parser.add('{"title": "').content == '{"title": "'
    assert parser.add("a\n").content == "a\n"


def test_content_does_not_wait_for_what_cannot_be_a_tag() -> None:
    parser = hermes()
    assert parser.add("one <").content == "one "
    assert parser.add("two").content == "<two"


# --- by the server ---

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "g", "parameters": {
    "properties": {"x": {"type": "integer"}}, "required": ["x"],
}}}  # fmt: skip
ASK: dict[str, Any] = {
    "model": "toy", "messages": [{"role": "user", "content": "call"}], "temperature": 0,
    "tools": [TOOL],
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Its template has `<tool_call>`, so that its calls are those of hermes."""
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
        assert [call.index for call in calls] == [0] * len(calls)
        assert calls[0].function.name == "f"
        assert not any(call.function.name or call.id for call in calls[1:])
        assert "".join(call.function.arguments for call in calls) == function.arguments
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
        assert "--tool-format" in answer.json()["error"]["message"]


# --- guides beside calls ---


def tag_tokenizer() -> Any:
    """Its tags are tokens, as Qwen's are."""
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")]
    )
    return tokenizer


def service_of(tool_format: str, tokenizer: Any = None) -> Any:
    options = ServerOptions(tool_format=tool_format, reasoning_parser="none")
    return SimpleNamespace(options=options, tokenizer=tokenizer or toy_tokenizer())


def admits(guide: Any, text: str, tokenizer: Any = None) -> bool:
    tokenizer = tokenizer or toy_tokenizer()
    matcher = guide.matcher(Vocabulary(tokenizer, len(tokenizer)))
    for token in tokenizer.encode(text):
        is_allowed = bool(matcher.allowed()[token // 32] >> token % 32 & 1)
        assert is_allowed == matcher.advance(token)
        if not is_allowed:
            return False
    return bool(matcher.may_end())


FORM = {"type": "json_schema", "json_schema": {"schema": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    "additionalProperties": False,
}}}  # fmt: skip


@pytest.mark.parametrize("name", ["hermes", "llama"])
@pytest.mark.parametrize("parallel", [True, False])
def test_beside_a_format_calls_are_possible(name: str, parallel: bool) -> None:
    asked = ChatRequest(
        messages=[], tools=[TOOL, OTHER], response_format=FORM, parallel_tool_calls=parallel
    )
    one = '<tool_call>\n{"name":"g","arguments":{"x":1}}\n</tool_call>'
    if name == "llama":
        one = '{"name":"g","parameters":{"x":1}}'
    two = f"{one}; {one}" if name == "llama" else f"{one}\n{one}"
    for tokenizer in (toy_tokenizer(), tag_tokenizer()):
        reading = read_tools(asked, service_of(name, tokenizer)).reading([])
        guide = reading.guide(read_guide(asked))["guide"]
        for text, wanted in (
            ('{"a":1}', True), (one, True), (two, parallel), ("a", False), (one[:-1], False),
            (one.replace("g", "h"), False), (one.replace("1", '"1"'), False),
        ):  # fmt: skip
            assert admits(guide, text, tokenizer) == wanted, text
    for text, count in (('{"a":1}', 0), (one, 1), (two, 2 if parallel else 1)):
        parser = reading.parser()
        parts = parser.add(text) + parser.finish()
        assert len(parts.calls) == count
        assert bool(parts.content) == (not count)


def test_a_choice_or_an_expression_beside_calls() -> None:
    for form, text in (
        ({"type": "regex", "regex": "[0-9]/+"}, "7//"),
        ({"type": "choice", "choice": ["é\n", "no"]}, "é\n"),
        ({"type": "json_object"}, '{"b":[]}'),
        ({"type": "json_object"}, BARE.replace(" ", "")),  # without tags, and so content
    ):
        asked = ChatRequest(messages=[], tools=[TOOL], response_format=form)
        reading = read_tools(asked, service_of("hermes")).reading([])
        assert admits(reading.guide(read_guide(asked))["guide"], text)
        parser = reading.parser()
        assert parser.add(text) + parser.finish() == Parts(content=text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_an_answer_that_must_be_a_call_has_no_format(choice: Any) -> None:
    """And one call where the request says so."""
    asked = {"messages": [], "tools": [OTHER], "tool_choice": choice, "response_format": FORM}
    told = ChatRequest(**asked, parallel_tool_calls=False)
    reading = read_tools(told, service_of("hermes")).reading([])
    guide = reading.guide(read_guide(told))["guide"]
    one = '{"name":"g","arguments":{"x":1}}' if choice == "required" else '{"x":1}'
    assert admits(guide, f"[{one}]" if choice == "required" else one)
    assert not admits(guide, '{"a":1}')
    assert not admits(guide, f"[{one},{one}]")
    reading = read_tools(ChatRequest(**asked), service_of("hermes")).reading([])
    two = f"[{one},{one}]"
    assert admits(reading.guide(None)["guide"], two) == (choice == "required")
    parser = reading.parser()
    assert len((parser.add(one) + parser.finish()).calls) == 1


def test_parameters_are_those_of_an_object() -> None:
    for parameters in ({"type": "array"}, {"type": "string"}, [1], "x"):
        function = {"name": "f", "parameters": parameters}
        asked = ChatRequest(messages=[], tools=[{"type": "function", "function": function}])
        with pytest.raises(ApiError, match=r'expected .*"type": "object"'):
            read_tools(asked, service_of("hermes"))
