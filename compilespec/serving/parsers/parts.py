"""Parts of an answer, and text that waits for the end of a tag."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call that the model writes, or more of the arguments of the call before it."""

    name: str
    """Empty: more arguments."""

    arguments: str
    """JSON; incomplete where the answer was cut, or where the model wrote something else."""

    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The additions of a piece of text to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            content=self.content + other.content,
            reasoning=self.reasoning + other.reasoning,
            calls=_joined(self.calls, other.calls),
        )

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Parser(Protocol):
    """Takes the text of one answer, piece by piece."""

    def add(self, text: str) -> Parts:
        """The parts that are certain once this text has come."""

    def finish(self) -> Parts:
        """The rest: no more text comes."""


class Plain:
    """Treats all text as content."""

    def add(self, text: str) -> Parts:
        return Parts(content=text)

    def finish(self) -> Parts:
        return Parts()


class First:
    """Keeps only the first of the calls that another parser finds."""

    def __init__(self, inner: Parser) -> None:
        self._inner, self._num_calls = inner, 0

    def add(self, text: str) -> Parts:
        return self._cut(self._inner.add(text))

    def finish(self) -> Parts:
        return self._cut(self._inner.finish())

    def _cut(self, parts: Parts) -> Parts:
        kept = []
        for call in parts.calls:
            self._num_calls += bool(call.name)
            kept += [call] * (self._num_calls == 1)
        return replace(parts, calls=tuple(kept))


def _joined(calls: tuple[ToolCall, ...], more: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    if not calls or not more or more[0].name:
        return calls + more
    last = replace(calls[-1], arguments=calls[-1].arguments + more[0].arguments)
    return _joined((*calls[:-1], last), more[1:])


def read_json(text: str) -> Any:
    """A value that every client can read again: halves of characters become U+FFFD.

    Raises: ValueError: no JSON, NaN or infinities in it, or nested too deep.
    """
    try:
        value = json.loads(text, strict=False)  # models leave raw line ends in strings
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    whole = written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value if whole == written else json.loads(whole)


def held_back(text: str, tag: str) -> int:
    """The number of characters at the end of the text that may begin the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
