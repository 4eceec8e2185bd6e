"""Tool calls as models write them.

Source: the chat templates of Hermes and Qwen2.5 / Qwen3 (JSON between `<tool_call>` tags) and of
    Llama 3.1 and later (an answer that is JSON with a name and parameters); Qwen2.5-Coder leaves
    its tags out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from compilespec.serving.parsers.parts import Parts, ToolCall, held_back

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
FENCE = "```"
_LABEL = r"(?:json|tool_call)?[ \t]*"
_FENCE_BEGUN = re.compile(rf"(?:`{{1,2}}|{FENCE}[a-z_]*[ \t]*|{FENCE}{_LABEL}\n\s*)\Z")
_KEYS = tuple(f'{{"{key}":' for key in ("name", "arguments", "parameters", "type", "id"))
_HEAD = 64  # characters in which the first key of a call without a tag is looked for


class Hermes:
    """Calls among content, as JSON between tags.

    A call of a known name may also stand without tags, in a fence or bare, where the answer or a
    line begins.  Everything else stays content.  The result depends on the text, not on how it is
    cut into pieces.

    Args: names: of functions that may be called without tags.
    """

    begin, end = BEGIN, END

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names)
        self._openings = re.compile(
            rf"(?P<tag>{re.escape(self.begin)})|(?P<fence>{FENCE}{_LABEL}\n\s*(?=[\[{{]))"
            r"|(?P<bare>(?=[\[{]))"
        )
        self._text = ""  # text that is neither reported nor skipped yet
        self._run: str | None = None  # the opening of a run of calls: its group in `_openings`
        self._opening = ""  # its text
        self._has_called = False  # calls in this run
        self._follows = "start"  # the last report: "call", "line" (its end) or "text"
        self._value = _Value()

    def add(self, text: str) -> Parts:
        self._text += text
        return self._take(is_end=False)

    def finish(self) -> Parts:
        return self._take(is_end=True)

    def _take(self, *, is_end: bool) -> Parts:
        parts = Parts()
        while True:
            told = self._outside(is_end) if self._run is None else self._inside(is_end)
            if told is None:
                return parts
            parts += told

    def _outside(self, is_end: bool) -> Parts | None:
        """The content before the next run; None: not known yet, or no more."""
        if self._follows == "call":  # white space between calls is no content
            self._text = self._text.lstrip()
        text = self._text
        if not text:
            return None
        for match in self._openings.finditer(text):
            if match["tag"] or self._may_call(match.start()):
                return self._begin_run(match)
        given = text[: len(text) - (0 if is_end else self._held_back())]
        if not given or (self._follows == "start" and given.isspace() and not is_end):
            return None
        self._text = text[len(given) :]
        self._follows = "line" if given.endswith("\n") else "text"
        return Parts(content=given)

    def _may_call(self, at: int) -> bool:
        """True where a call without a tag may begin: at the beginning of the answer or of a
        line.
        """
        before = self._text[:at]
        if not self._names or (self._follows == "text" and not before):
            return False
        return (
            not before or before.endswith("\n") or (self._follows == "start" and before.isspace())
        )

    def _held_back(self) -> int:
        """The number of characters at the end of the text that may begin a run."""
        found = _FENCE_BEGUN.search(self._text)
        if found and self._may_call(found.start()):
            return len(self._text) - found.start()
        return held_back(self._text, self.begin)

    def _begin_run(self, match: re.Match[str]) -> Parts:
        before = self._text[: match.start()]
        is_first = self._follows == "start" and not before.strip()
        self._run, self._has_called = match.lastgroup, False
        self._opening = before + match[0] if is_first else match[0]
        self._follows = self._follows if is_first or not before else "text"
        self._text, self._value = self._text[match.end() :], _Value()
        return Parts(content="" if is_first else before)

    def _inside(self, is_end: bool) -> Parts | None:
        """The next call of a run; None: it is not complete yet."""
        rest = self._text.lstrip(" \t\r\n,;")
        if rest[:1] in ("{", "["):
            return self._read(len(self._text) - len(rest), is_end)
        mark = FENCE if self._run == "fence" else self.end
        if not is_end and mark.startswith(rest) and (self._has_called or not rest):
            return None
        if self._has_called and (not rest or (mark and rest.startswith(mark))):
            self._text = rest.removeprefix(mark)
        return self._end_run()

    def _read(self, at: int, is_end: bool) -> Parts | None:
        """The calls of the JSON that begins at a place."""
        is_tagged = self._run == "tag"
        if not is_tagged and not _may_be_call(self._text[at : at + _HEAD]):
            return self._end_run()
        end = self._value.end(self._text, at)
        if end is None:
            return self._end_run() if is_end else None
        calls = read_calls(self._text[at:end], None if is_tagged else self._names)
        if not calls:
            return self._end_run()
        self._text, self._value, self._has_called = self._text[end:], _Value(), True
        return Parts(calls=calls)

    def _end_run(self) -> Parts:
        """Leave a run; the opening of a run without a call is content."""
        is_bare, self._run = self._run == "bare", None
        if self._has_called:
            self._follows = "call"
            return Parts()
        if is_bare and self._follows == "start":
            self._names = frozenset()  # an answer that is JSON of another kind
        size = int(is_bare)
        content, self._text = self._opening + self._text[:size], self._text[size:]
        self._follows = "text"
        return Parts(content=content)


class Llama(Hermes):
    """Calls as JSON without tags, with `;` between them, or behind `<|python_tag|>`."""

    begin, end = PYTHON_TAG, ""


class Whole:
    """The answer under a guide: the arguments of one call, or a list of calls.

    Args:
        name: of the function whose arguments they are; None: a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._text = name, ""

    def add(self, text: str) -> Parts:
        self._text += text
        return Parts()

    def finish(self) -> Parts:
        """An answer that was cut at the limit of tokens is content."""
        text = self._text
        if self._name is not None:
            text = f'{{"name": {json.dumps(self._name)}, "arguments": {text or "0"}}}'
        calls = read_calls(text, None)
        return Parts(calls=calls) if calls else Parts(content=self._text)


class _Value:
    """Looks for the end of a JSON object or list, in time linear in its text."""

    _string, _other = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')

    def __init__(self) -> None:
        self._at, self._depth, self._is_string = 0, 0, False

    def end(self, text: str, start: int) -> int | None:
        """The end of the value that begins at `start`; None: it lies beyond the text."""
        at = max(self._at, start)
        while match := (self._string if self._is_string else self._other).search(text, at):
            at = match.end()
            if match[0] == "\\":
                at += 1
                if at > len(text):
                    self._at = match.start()
                    return None
            elif match[0] == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if not self._depth:
                    return at
        self._at = max(at, len(text))
        return None


def read_calls(text: str, names: Collection[str] | None) -> tuple[ToolCall, ...]:
    """The call, or the list of calls, that JSON represents; empty for other JSON.

    Args: names: of functions; None: of any.
    """
    try:
        value = read_json(text)
        calls = [_as_call(one, names) for one in (value if isinstance(value, list) else [value])]
    except ValueError:
        return ()
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else ()


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


def _as_call(value: Any, names: Collection[str] | None) -> ToolCall | None:
    """A call with an object as arguments, which clients expect: other JSON is no call, null means
    no arguments.  Raises: ValueError.

    Raises: ValueError.
    """
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    if names is not None and (name not in names or not value.keys() & {"arguments", "parameters"}):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():  # JSON in JSON
        arguments = read_json(arguments)
    if arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _may_be_call(head: str) -> bool:
    """True where text with this beginning may be a call, or a list of calls."""
    begun = "".join(head.split()).lstrip("[")
    return any(key.startswith(begun[: len(key)]) for key in _KEYS)
