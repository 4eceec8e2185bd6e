"""Tool calls as models write them.

Source: the chat templates of Hermes and Qwen2.5 / Qwen3 (JSON between `<tool_call>` tags) and of
    Llama 3.1 and later (an answer that is JSON with a name and parameters).
"""

from __future__ import annotations

import json
from typing import Any

from compilespec.serving.parsers.parts import Parts, ToolCall, held_back

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class Hermes:
    """Calls between tags, among content.  What is no call between tags stays content."""

    def __init__(self) -> None:
        self._text, self._is_inside, self._has_called = "", False, False

    def add(self, text: str) -> Parts:
        self._text += text
        parts = Parts()
        while True:
            tag = END if self._is_inside else BEGIN
            before, found, rest = self._text.partition(tag)
            if not found:
                break
            parts += self._read(before, found) if self._is_inside else self._content(before)
            self._is_inside, self._text = not self._is_inside, rest
        if not self._is_inside:
            keep = len(self._text) - held_back(self._text, BEGIN)
            parts += self._content(self._text[:keep])
            self._text = self._text[keep:]
        return parts

    def finish(self) -> Parts:
        rest, self._text = self._text, ""
        return self._read(rest, "") if self._is_inside else self._content(rest)

    def _content(self, text: str) -> Parts:
        """White space between calls is none."""
        return Parts() if self._has_called and not text.strip() else Parts(content=text)

    def _read(self, text: str, end: str) -> Parts:
        try:
            call = as_call(json.loads(text))
        except ValueError:
            call = None
        if call is None:
            return Parts(content=f"{BEGIN}{text}{end}")
        self._has_called = True
        return Parts(calls=(call,))


class Llama:
    """An answer that is one call or several, as JSON, with `;` between them; else it is content."""

    def __init__(self) -> None:
        self._text, self._is_content = "", False

    def add(self, text: str) -> Parts:
        if self._is_content:
            return Parts(content=text)
        self._text += text
        start = self._text.lstrip()
        if start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start):
            return Parts()
        self._is_content = True
        return Parts(content=self._text)

    def finish(self) -> Parts:
        if self._is_content:
            return Parts()
        calls = _calls_of(self._text.strip().removeprefix(PYTHON_TAG).strip())
        return Parts(calls=calls) if calls else Parts(content=self._text)


class Whole:
    """An answer that a guide made one call's arguments, or a list of calls.

    Args:
        name: of the function whose arguments they are; None: a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._text = name, ""

    def add(self, text: str) -> Parts:
        self._text += text
        return Parts()

    def finish(self) -> Parts:
        if self._name is not None:
            return Parts(calls=(ToolCall(name=self._name, arguments=self._text),))
        try:
            read = [as_call(one) for one in json.loads(self._text)]
        except (ValueError, TypeError):  # cut at the limit
            return Parts(content=self._text)
        return Parts(calls=tuple(call for call in read if call is not None))


def as_call(value: Any) -> ToolCall | None:
    """The call that JSON stands for; None: it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON
        return ToolCall(name=value["name"], arguments=arguments)
    return ToolCall(name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def _calls_of(text: str) -> tuple[ToolCall, ...]:
    """The calls that are all of the text; empty where it is anything else."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            return ()
        call = as_call(value)
        if call is None:
            return ()
        calls.append(call)
        while at < len(text) and text[at] in "; \n":
            at += 1
    return tuple(calls)
