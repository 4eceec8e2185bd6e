"""Parts of an answer, and text that waits for the end of a tag."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call that the model writes."""

    name: str
    arguments: str
    """JSON."""

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
            calls=self.calls + other.calls,
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
        self._inner, self._has_called = inner, False

    def add(self, text: str) -> Parts:
        return self._cut(self._inner.add(text))

    def finish(self) -> Parts:
        return self._cut(self._inner.finish())

    def _cut(self, parts: Parts) -> Parts:
        calls = () if self._has_called else parts.calls[:1]
        self._has_called |= bool(calls)
        return replace(parts, calls=calls)


def held_back(text: str, tag: str) -> int:
    """The number of characters at the end of the text that may begin the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
