"""Every form of tool calls: the same calls, however the text is cut; how a form is chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from compilespec.serving.parsers.calls import Calls
from compilespec.serving.parsers.formats import FORMATS
from compilespec.serving.parsers.parts import Parts
from tests.serving.tool_answers import ANSWERS, TOOLS, Answer

CASES = [(form, name) for form, answers in ANSWERS.items() for name in answers]


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
    assert ANSWERS.keys() == FORMATS.keys()


@pytest.mark.parametrize(("form", "name"), CASES)
def test_answers_give_their_calls_however_they_are_cut(form: str, name: str) -> None:
    answer: Answer = ANSWERS[form][name]
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
