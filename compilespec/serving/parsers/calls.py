"""Tool calls as models write them: one reader for every form of `formats`."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from compilespec.serving.parsers.arguments import JSON, ArgumentReader
from compilespec.serving.parsers.formats import Format
from compilespec.serving.parsers.parts import Parts, ToolCall, held_back, read_json

FENCE = "```"
_LABEL = r"(?:json|tool_call)?[ \t]*"
_FENCE_BEGUN = re.compile(rf"(?:`{{1,2}}|{FENCE}[a-z_]*[ \t]*|{FENCE}{_LABEL}\n\s*)\Z")
_KEYS = tuple(f'{{"{key}":' for key in ("name", "arguments", "parameters", "type", "id"))
_HEAD = 256  # characters in which the head of a call ends
_FIRST = 64  # characters in which the first key of a call without a tag is looked for
_BETWEEN = " \t\r\n,;"
_TAIL = re.compile(r"[^{}<]*")  # after the arguments of a call that is JSON


class Calls:
    """Calls among content.

    A call is certain when its head is read: its name comes then, and its arguments follow as they
    come.  What is no head stays content.  A call of a known name may also stand outside a run,
    where the form says so.  The result depends on the text, not on how it is cut into pieces.

    Args:
        tools: the schemas of the arguments, by the tools' names.
        has_calls: False: only the channels of the form are read.
        is_begun: the answer begins within a run.
    """

    def __init__(
        self,
        form: Format,
        tools: Mapping[str, Any] | None = None,
        *,
        has_calls: bool = True,
        is_begun: bool = False,
    ) -> None:
        self._form, self._tools, self._has_calls = form, tools or {}, has_calls
        self._names = frozenset(self._tools)
        self._head, self._reach = re.compile(form.head, re.S), re.compile(form.reach)
        self._begins = (*form.opens, *form.begins)
        self._closes = (*form.closes, *form.ends)
        self._marks = (*self._closes, *form.opens)
        begun = (f"(?={re.escape(one)})" for one in form.begins)
        self._openings = re.compile(
            rf"(?P<tag>{_any(map(re.escape, form.opens))})|(?P<begun>{_any(begun)})"
            rf"|(?P<fence>{FENCE}{_LABEL}\n\s*(?=[\[{{]))"
            rf"|(?P<bare>{_any(f'(?={re.escape(one)})' for one in form.bare)})"
        )
        self._text = ""  # text that is neither reported nor skipped yet
        # "outside", "between", "arguments", "tail", "raw" or "message"
        self._state = "between" if is_begun or form.has_channels else "outside"
        # The opening of a run of calls: its group in `_openings`.
        self._run = "tag" if is_begun else "bare"
        self._opening = ""  # its text
        self._has_called = False  # calls in this run
        self._follows = "start"  # the last report: "call", "line" (its end) or "text"
        self._value = _JsonValue()
        self._reading: ArgumentReader | None = None  # of the arguments of the call that is open
        self._is_fresh = False  # nothing of them is read
        self._is_object = False  # this call is JSON with its name in it
        self._is_reasoning = False  # the message that is open

    def add(self, text: str) -> Parts:
        self._text += text
        return self._take(is_end=False)

    def finish(self) -> Parts:
        return self._take(is_end=True)

    def _take(self, *, is_end: bool) -> Parts:
        parts = Parts()
        states = {
            "outside": self._outside, "between": self._between, "arguments": self._arguments,
            "tail": self._tail, "raw": self._raw, "message": self._message,
        }  # fmt: skip
        while True:
            told = states[self._state](is_end)
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
            if match.lastgroup in ("tag", "begun") or self._may_call(match.start()):
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
        if not self._names or not self._form.bare or (self._follows == "text" and not before):
            return False
        return (
            not before or before.endswith("\n") or (self._follows == "start" and before.isspace())
        )

    def _held_back(self) -> int:
        """The number of characters at the end of the text that may begin a run."""
        found = _FENCE_BEGUN.search(self._text)
        if found and self._may_call(found.start()):
            return len(self._text) - found.start()
        return max(held_back(self._text, one) for one in self._begins)

    def _begin_run(self, match: re.Match[str]) -> Parts:
        before = self._text[: match.start()]
        is_first = self._follows == "start" and not before.strip()
        self._state, self._run, self._has_called = "between", match.lastgroup or "", False
        self._opening = before + match[0] if is_first else match[0]
        self._follows = self._follows if is_first or not before else "text"
        self._text, self._value = self._text[match.end() :], _JsonValue()
        return Parts(content="" if is_first else before)

    def _between(self, is_end: bool) -> Parts | None:
        """The head of the next call of a run; None: it is not complete yet."""
        rest = self._text.lstrip(_BETWEEN)
        marks = (FENCE,) if self._run == "fence" else self._marks
        if self._has_called:
            for mark in marks:
                if rest.startswith(mark):
                    self._text = rest[len(mark) :]
                    if self._run == "fence" or mark in self._form.ends:
                        return self._end_run()
                    if mark in self._form.opens:
                        self._run, self._opening, self._follows = "tag", mark, "call"
                        self._has_called = False
                    return Parts()
            if self._form.is_object and rest and rest[0] not in "{[" and not _begun(rest, marks):
                return self._end_run()
        if not is_end and (not rest or (self._has_called and _begun(rest, marks))):
            return None
        if rest and (self._run in ("tag", "begun") or self._may_be_head(rest)):
            return self._read_head(rest, is_end)
        return self._end_run()

    def _may_be_head(self, rest: str) -> bool:
        """True where a call without a tag, or a message after the prompt's role, may have begun."""
        if self._form.has_channels:
            marks = ("to=", *self._form.begins)
            return rest.startswith(marks) or _begun(rest, marks)
        if self._form.is_object:
            return rest[0] in "{[" and _may_be_call(rest[:_FIRST])
        name, mark, _ = rest.lstrip("[ \n").partition("(")
        return name in self._names if mark else any(one.startswith(name) for one in self._names)

    def _read_head(self, rest: str, is_end: bool) -> Parts | None:
        reach = self._reach.search(rest)
        found = self._head.match(rest) if reach else None
        if found is None:
            if reach is None and len(rest) < _HEAD and not is_end:
                return None
            return self._read_whole(len(self._text) - len(rest), is_end)
        groups = found.groupdict()
        name = groups.get("name") or groups.get("called")
        if self._form.has_channels and (name is None or not self._has_calls):
            self._text = rest[found.end() :]
            self._is_reasoning, self._state = groups["channel"] == "analysis", "message"
            return Parts()
        if name is None or (self._run in ("bare", "fence") and name not in self._names):
            return self._read_whole(len(self._text) - len(rest), is_end)
        self._text, self._has_called, self._state = rest[found.end() :], True, "arguments"
        self._is_fresh = True
        self._is_object = found[0].lstrip("[ \n").startswith("{")
        self._reading = self._form.arguments.reading(self._closes, self._tools.get(name))
        return Parts(calls=(self._call(name, "", groups.get("id")),))

    def _call(self, name: str, arguments: str, given: str | None = None) -> ToolCall:
        size = self._form.id_length
        made = uuid.uuid4().hex
        return ToolCall(
            name=name,
            arguments=arguments,
            id=given or (made[:size] if size else f"call_{made[:24]}"),
        )

    def _arguments(self, is_end: bool) -> Parts | None:
        """More arguments of the call that is open."""
        assert self._reading is not None, "a head was read"
        rest = self._text.lstrip()
        if self._is_fresh and rest.startswith(self._closes):
            self._text, self._state = rest, "between"
            return Parts(calls=(ToolCall(name="", arguments="{}"),))
        if self._is_fresh and not is_end and (not rest or _begun(rest, self._closes)):
            return None
        self._is_fresh = False
        told, self._text = self._reading.add(self._text, is_end=is_end)
        if self._reading.is_done:
            self._state = "tail" if self._is_object else "between"
        elif self._reading.is_broken:
            self._state = "raw"
        elif not told:
            return None
        return Parts(calls=(ToolCall(name="", arguments=told),) if told else ())

    def _raw(self, is_end: bool) -> Parts | None:
        """Arguments that are in another form than expected, as they stand."""
        told, ended = self._up_to(self._closes, is_end)
        self._state = "between" if ended else "raw"
        if not told and not ended:
            return None
        return Parts(calls=(ToolCall(name="", arguments=told),) if told else ())

    def _tail(self, is_end: bool) -> Parts | None:
        """Skip what follows the arguments in a JSON call, with the brace that closes the call.

        Returns: empty parts; None while the end may still come.
        """
        end = _TAIL.match(self._text).end()  # type: ignore[union-attr]
        if end == len(self._text) and not is_end:
            return None
        if self._text[end : end + 1] == "}":
            self._text = self._text[end + 1 :]
        self._state = "between"
        return Parts()

    def _message(self, is_end: bool) -> Parts | None:
        """The text of a message."""
        told, ended = self._up_to((*self._form.closes, *self._form.begins), is_end)
        if ended:
            self._state, self._follows = "outside", "call"
            self._text = _without(self._text, self._form.closes)
        if not told and not ended:
            return None
        return Parts(reasoning=told) if self._is_reasoning else Parts(content=told)

    def _up_to(self, marks: tuple[str, ...], is_end: bool) -> tuple[str, bool]:
        """The text before the first of these marks, and whether it is there."""
        text = self._text
        places = [at for mark in marks if (at := text.find(mark)) >= 0]
        held = 0 if is_end else max((held_back(text, mark) for mark in marks), default=0)
        end = min(places) if places else len(text) - held
        self._text = text[end:]
        return text[:end], bool(places)

    def _read_whole(self, at: int, is_end: bool) -> Parts | None:
        """The calls of the JSON that begins at a place, which is no head."""
        if not self._form.is_object or self._text[at : at + 1] not in ("{", "["):
            return self._end_run()
        end = self._value.end(self._text, at)
        if end is None:
            return self._end_run() if is_end else None
        is_tagged = self._run in ("tag", "begun")
        calls = read_calls(self._text[at:end], None if is_tagged else self._names)
        if not calls:
            return self._end_run()
        self._text, self._value, self._has_called = self._text[end:], _JsonValue(), True
        return Parts(calls=tuple(self._call(call.name, call.arguments) for call in calls))

    def _end_run(self) -> Parts:
        """Leave a run; the opening of a run without a call is content."""
        is_bare, self._state = self._run in ("bare", "begun"), "outside"
        if self._has_called:
            self._follows = "call"
            return Parts()
        if is_bare and self._follows == "start" and self._run == "bare":
            self._names = frozenset()  # an answer that is JSON of another kind
        size = int(is_bare)
        content, self._text = self._opening + self._text[:size], self._text[size:]
        self._follows = "text"
        return Parts(content=content)


class Named:
    """The answer under a guide that holds it to the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._call = ToolCall(name=name, arguments="")
        self._reading, self._text = JSON.reading((), None), ""

    def add(self, text: str) -> Parts:
        told, self._text = self._reading.add(self._text + text, is_end=False)
        if self._reading.is_broken:
            told, self._text = told + self._text, ""
        call, self._call = self._call, ToolCall(name="", arguments="")
        return Parts(calls=(replace(call, arguments=told),) if told or call.name else ())

    def finish(self) -> Parts:
        return self.add("")


class _JsonValue:
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


def _any(patterns: Iterable[str]) -> str:
    """Any of these expressions; of none, nothing."""
    return "|".join(patterns) or "(?!)"


def _begun(text: str, marks: tuple[str, ...]) -> bool:
    """True where a text is the beginning of a mark."""
    return any(mark.startswith(text) for mark in marks)


def _without(text: str, marks: tuple[str, ...]) -> str:
    """A text without the mark that it begins with."""
    found = next((mark for mark in marks if text.startswith(mark)), "")
    return text[len(found) :]


def _may_be_call(head: str) -> bool:
    """True where text with this beginning may be a call, or a list of calls."""
    begun = "".join(head.split()).lstrip("[")
    return any(key.startswith(begun[: len(key)]) for key in _KEYS)
