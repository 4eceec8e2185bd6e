"""Every form of tool calls: the same calls, however the text is cut; how a form is chosen."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from compilespec.errors import InvalidOption
from compilespec.serving import ServerOptions
from compilespec.serving.parsers.calls import Calls
from compilespec.serving.parsers.formats import FORMATS, known_format, known_reasoning
from compilespec.serving.parsers.parts import Parts
from compilespec.serving.tools import tool_format
from tests.serving.tool_answers import HARMONY, KIMI_K2, MISTRAL, TOOLS, Answer
from tests.serving.tool_writers import ALL
from tests.support.live_server import Live, live, toy_engine, toy_tokenizer

ALWAYS = ("written: three at once", "written: every kind of value")
CASES = [
    pytest.param(form, name, marks=pytest.mark.slow)
    if name.startswith("written") and name not in ALWAYS
    else (form, name)
    for form, answers in ALL.items()
    for name in answers
]


def read(form: str, pieces: tuple[str, ...] | list[str]) -> Parts:
    parser, parts = Calls(FORMATS[form], TOOLS), Parts()
    for piece in pieces:
        parts += parser.add(piece)
    return parts + parser.finish()


def cuts(text: str) -> Iterator[list[str]]:
    """The whole, single characters, and every split into two."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))


def told(parts: Parts) -> Any:
    calls = [(call.name, call.arguments) for call in parts.calls]
    return parts.content, parts.reasoning, calls


def test_every_form_has_answers() -> None:
    assert ALL.keys() == FORMATS.keys()
    assert all(len(answers) >= 30 for answers in ALL.values())


@pytest.mark.parametrize(("form", "name"), CASES)
def test_answers_give_their_calls_however_they_are_cut(form: str, name: str) -> None:
    answer: Answer = ALL[form][name]
    whole = read(form, [answer.text])
    assert (whole.content, whole.reasoning) == (answer.content, answer.reasoning)
    assert [call.name for call in whole.calls] == [name for name, _ in answer.calls]
    for call, (_, wanted) in zip(whole.calls, answer.calls, strict=True):
        if isinstance(wanted, str):
            assert call.arguments == wanted
        else:
            assert json.loads(call.arguments) == wanted
    for pieces in cuts(answer.text):
        assert told(read(form, pieces)) == told(whole), pieces


SLOW = {"harmony": "lines and braces", "mistral": "lines and braces", "kimi_k2": "lines and braces",
        "qwen3_coder": "lines and braces", "glm4": "lines and braces", "gemma4": "lines and braces",
        "pythonic": "lines and braces", "deepseek_v32": "lines and braces", "hermes": "one",
        "minimax_m2": "lines and braces", "deepseek_v31": "unicode", "llama": "marked",
        "deepseek_v3": "braces"}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_names_come_before_arguments_and_these_as_they_are_written(form: str) -> None:
    answer = ALL[form][SLOW[form]]
    parser = Calls(FORMATS[form], TOOLS)
    pieces = [call for char in answer.text for call in parser.add(char).calls]
    assert pieces[0].name == answer.calls[0][0]
    assert pieces[0].arguments in ("", "{")
    assert not any(call.name for call in pieces[1:])
    whole = "".join(call.arguments for call in pieces)
    assert max(len(call.arguments) for call in pieces) < max(12, len(whole) // 3)


@pytest.mark.parametrize("form", FORMATS)
def test_content_waits_no_longer_than_for_a_mark(form: str) -> None:
    """A long answer without calls comes as it is written."""
    parser, text = Calls(FORMATS[form], TOOLS), "Once {upon} a [time] < and `more`.\n" * 20
    longest = told_size = 0
    for count, char in enumerate(text, start=1):
        told_size += len(parser.add(char).content)
        longest = max(longest, count - told_size)
    assert longest < 40
    assert len(parser.finish().content) == len(text) - told_size


@pytest.mark.parametrize("form", FORMATS)
def test_long_arguments_take_time_in_proportion(form: str) -> None:
    """A text of 100,000 characters, in pieces and whole; a square would take minutes."""
    name = next(name for name in ("unicode", "braces", "one", "marked") if name in ALL[form])
    text = ALL[form][name].text.replace("日本", "\n日<" * 33_000)
    text = text.replace("Oslo", "a<" * 50_000).replace("}{", "}{[" * 33_000)
    begun = time.perf_counter()
    whole = told(read(form, [text]))
    parser = Calls(FORMATS[form], TOOLS)
    pieces = [call for at in range(0, len(text), 8) for call in parser.add(text[at : at + 8]).calls]
    assert "".join(call.arguments for call in pieces) == "".join(call[1] for call in whole[2])
    assert time.perf_counter() - begun < 5


def test_ids_are_what_the_templates_take() -> None:
    mistral = read("mistral", [MISTRAL["a list"].text]).calls[0].id
    assert len(mistral) == 9
    assert mistral.isalnum()
    assert read("mistral", [MISTRAL["with an id"].text]).calls[0].id == "Ab3dE6gH9"
    kimi = read("kimi_k2", [KIMI_K2["two"].text]).calls
    assert [call.id for call in kimi] == ["functions.weather:0", "functions.weather:1"]


def test_harmony_without_tools_is_read_for_its_channels() -> None:
    parser = Calls(FORMATS["harmony"], has_calls=False)
    parts = parser.add(HARMONY["thought and call"].text) + parser.finish()
    assert (parts.content, parts.reasoning, parts.calls) == (
        '{"city": "Oslo"}', "Look it up.", (),
    )  # fmt: skip


# --- which form ---

TEMPLATES = {
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.",
    "gemma4": "{{ '<|tool_call>call:' }}<|channel>thought",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "deepseek_v3": "'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json'",
    "deepseek_v31": "'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
    "minimax_m2": "<minimax:tool_call>\n<invoke name=",
    "glm4": "<tool_call>{name}<arg_key>{key}</arg_key>",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=",
    "hermes": '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>',
    "mistral": "[AVAILABLE_TOOLS][/AVAILABLE_TOOLS][TOOL_CALLS]",
    "pythonic": "[func_name1(params_name1=params_value1), func_name2(params)]",
    "llama": '{"name": function name, "parameters": dictionary}',
    "none": "{{ messages }}",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_shows_its_form(form: str) -> None:
    assert known_format(TEMPLATES[form]) == form


@pytest.mark.parametrize(
    ("template", "token", "wanted"),
    [
        ("{{ messages }}", "｜DSML｜", "deepseek_v32"),
        ("{{ messages }}", "[TOOL_CALLS]", "mistral"),
        (TEMPLATES["hermes"], "[TOOL_CALLS]", "hermes"),
        ("{{ messages }}", "<s>", "none"),
    ],
)
def test_tokens_show_the_form_where_the_template_does_not(
    template: str, token: str, wanted: str
) -> None:
    tokenizer = toy_tokenizer((token,))
    tokenizer.chat_template = template
    service: Any = SimpleNamespace(tokenizer=tokenizer, options=ServerOptions())
    assert tool_format(service) == wanted
    service.options = ServerOptions(tool_format="glm4")
    assert tool_format(service) == "glm4"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think>", "think"),
        ("'<|channel>thought\\n'", "gemma4"),
        ("[THINK]", "mistral"),
        ("x", "none"),
    ],
)
def test_a_template_shows_its_reasoning(template: str, name: str) -> None:
    assert known_reasoning(template) == name


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidOption, match=r"tool_format: expected one of auto, harmony, .*'xml'"):
        ServerOptions(tool_format="xml")
    with pytest.raises(InvalidOption, match="reasoning_parser: expected one of auto, think"):
        ServerOptions(reasoning_parser="r1")


# --- by the server ---

SPECIAL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
ASK: dict[str, Any] = {
    "model": "toy", "messages": [{"role": "user", "content": "Oslo?"}], "temperature": 0,
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Its vocabulary has harmony's marks, which are special tokens."""
    says = HARMONY["thought and call"].text
    pieces = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", says)
    ids: list[int] = []
    for piece in pieces:
        ids += [259 + SPECIAL.index(piece)] if piece in SPECIAL else list(piece.encode())
    options = ServerOptions(model_names=("toy",), tool_format="harmony")
    with live(toy_engine(ids, special=SPECIAL), options) as server:
        yield server


def test_marks_that_are_special_tokens_are_read(server: Live) -> None:
    with server.openai() as client:
        choice = client.chat.completions.create(**ASK).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.reasoning_content == "Look it up."
        call = choice.message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
        streamed = arguments = ""
        for chunk in client.chat.completions.create(**ASK, stream=True):
            delta = chunk.choices[0].delta
            streamed += getattr(delta, "reasoning_content", None) or ""
            arguments += "".join(c.function.arguments for c in delta.tool_calls or ())
        assert (streamed, arguments) == ("Look it up.", call.arguments)
        assert chunk.choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_is_said_to_be(server: Live) -> None:
    with server.openai() as client:
        choice = client.chat.completions.create(**ASK, max_tokens=75).choices[0]
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls[0].function.arguments == '{"ci'


def test_without_tools_the_marks_are_no_content(server: Live) -> None:
    with server.openai() as client:
        asked = {name: value for name, value in ASK.items() if name != "tools"}
        message = client.chat.completions.create(**asked).choices[0].message
        assert (message.content, message.reasoning_content) == ('{"city": "Oslo"}', "Look it up.")
        plain = client.completions.create(model="toy", prompt="a:", temperature=0, max_tokens=30)
        assert plain.choices[0].text.startswith("analysisLook it up.")


def test_a_format_beside_calls_is_refused_by_name(server: Live) -> None:
    with server.client() as client:
        form = {"type": "json_object"}
        answer = client.post("/v1/chat/completions", json={**ASK, "response_format": form})
        assert answer.status_code == 400
        assert "not built for harmony calls" in answer.json()["error"]["message"]
