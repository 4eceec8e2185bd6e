"""Arguments of tool calls, turned into JSON as they come.

Two kinds of writing: a value of a language like JSON, and a tag for each argument.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from compilespec.serving.parsers.parts import held_back, read_json

DEPTH = 100  # nested values beyond which arguments are given as they stand
KEY = 256  # characters within which the tag of an argument ends
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([^uUx]))", re.S)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_LONGEST_ESCAPE = 10
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
          dict: "object", type(None): "null"}  # fmt: skip


class ArgumentReader(Protocol):
    """Reads the arguments of one call."""

    is_done: bool
    is_broken: bool  # what follows is not in this form

    def add(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """The JSON that is certain once this text has come, and the text that waits for more."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """A notation for values."""

    quotes: tuple[str, ...] = ('"',)
    opens: str = "{["
    """The first characters of objects and lists."""

    words: Mapping[str, str] = field(
        default_factory=lambda: {word: word for word in ("true", "false", "null")}
    )
    """Constants, and their JSON."""

    key: str | None = None
    """Keys without quotes, as an expression."""

    word: str = r"[^\s,:={}\[\]()\"']+"
    """Values without quotes, as an expression."""

    has_escapes: bool = True
    has_bare_text: bool = False
    """Text may stand without quotes."""

    def reading(self, closes: tuple[str, ...], schema: Any) -> ArgumentReader:
        del closes, schema
        return _PlainValue(self)


@dataclass(frozen=True, kw_only=True)
class Tags:
    """A tag for each argument; the tool's schema says which values are text."""

    begin: str
    key: str
    """The tag that begins a value, as an expression with the group `key`, and `string` where the
    tag itself says whether the value is text."""

    reach: str
    """The text that ends this tag."""

    end: str
    pad: str = ""
    """Stands between tags and value, and is no part of it."""

    def reading(self, closes: tuple[str, ...], schema: Any) -> ArgumentReader:
        return _Tagged(self, closes, schema)


JSON = Language()
PYTHON = Language(
    quotes=('"', "'"), opens="{[(", key=r"[^\W\d]\w*",
    words={**JSON.words, "True": "true", "False": "false", "None": "null"},
)  # fmt: skip
GEMMA = Language(
    quotes=('<|"|>',), key=r"[^:,{}\[\]]+", word=r"[^,{}\[\]]+", has_escapes=False,
    has_bare_text=True,
)  # fmt: skip


class _PlainValue:
    """One object, or Python's arguments between parentheses."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._key, self._word = re.compile(language.key or r"(?!)"), re.compile(language.word)
        self._open: list[list[Any]] = []  # of each value: what closes it, has keys, how many
        self._expects = "value"  # or "key", "colon", "comma"
        self._quote, self._half = "", ""  # of the string that is open; half of a character
        self._stops = re.compile("")
        self.is_done = self.is_broken = False

    def add(self, text: str, *, is_end: bool) -> tuple[str, str]:
        del is_end
        told: list[str] = []
        at = 0
        while not self.is_done and not self.is_broken:
            step = self._string(text, at) if self._quote else self._token(text, at)
            if step is None:
                break
            told.append(step[0])
            at = step[1]
        return "".join(told), text[at:]

    def _token(self, text: str, at: int) -> tuple[str, int] | None:
        at = _end(_SPACE, text, at)
        rest = text[at : at + 8]
        if not rest or any(quote.startswith(rest) and quote != rest for quote in self._quotes):
            return None
        char, top = rest[0], self._open[-1] if self._open else None
        if top is None:
            return self._push(char, at) if char in "{(" else self._break(at)
        if char == top[0] and self._expects in ("comma", "key" if top[1] else "value"):
            return self._pop(at)
        if self._expects == "comma":
            self._expects = "key" if top[1] else "value"
            return ("", at + 1) if char == "," else self._break(at)
        if self._expects == "colon":
            self._expects = "value"
            is_right = char == ("=" if top[0] == ")" else ":")
            return (": ", at + 1) if is_right else self._break(at)
        quote = next((quote for quote in self._quotes if rest.startswith(quote)), "")
        if quote:
            self._quote = quote
            self._stops = re.compile(
                re.escape(quote) + (r"|\\" if self._language.has_escapes else "")
            )
            return self._comma() + '"', at + len(quote)
        if self._expects == "value" and char in self._language.opens:
            return self._push(char, at)
        return self._bare(text, at)

    @property
    def _quotes(self) -> tuple[str, ...]:
        return self._language.quotes

    def _push(self, char: str, at: int) -> tuple[str, int]:
        if len(self._open) >= DEPTH:
            return self._break(at)
        has_keys = char == "{" or not self._open
        before = self._comma() if self._open else ""
        self._open.append([{"{": "}", "[": "]", "(": ")"}[char], has_keys, 0])
        self._expects = "key" if has_keys else "value"
        return before + ("{" if has_keys else "["), at + 1

    def _pop(self, at: int) -> tuple[str, int]:
        _, has_keys, _ = self._open.pop()
        self._expects, self.is_done = "comma", not self._open
        return "}" if has_keys else "]", at + 1

    def _break(self, at: int) -> tuple[str, int]:
        self.is_broken = True
        return "", at

    def _comma(self) -> str:
        """The text before the next key or value; it is what comes next."""
        top = self._open[-1]
        is_first_of_pair = self._expects == "key" or not top[1]
        self._expects = "colon" if self._expects == "key" else "comma"
        top[2] += is_first_of_pair
        return ", " if is_first_of_pair and top[2] > 1 else ""

    def _bare(self, text: str, at: int) -> tuple[str, int] | None:
        is_key = self._expects == "key"
        end = _end(self._key if is_key else self._word, text, at)
        if end == len(text):  # there may be more of it
            return None
        word = text[at:end].strip()
        is_name = is_key and (self._language.has_bare_text or self._open[-1][0] == ")")
        told = _quoted(word) if is_name and word else None if is_key else self._constant(word)
        return self._break(at) if told is None else (self._comma() + told, end)

    def _constant(self, word: str) -> str | None:
        language = self._language
        if word in language.words:
            return language.words[word]
        if _NUMBER.fullmatch(word):
            return word if math.isfinite(float(word)) else None
        if language.has_bare_text:
            return _quoted(word) if word else None
        if language is PYTHON:
            return _python_number(word)
        return None

    def _string(self, text: str, at: int) -> tuple[str, int] | None:
        stop = self._stops.search(text, at)
        end = stop.start() if stop else max(at, len(text) - held_back(text, self._quote))
        if end > at:
            return self._flushed() + _escaped(text[at:end]), end
        if stop is None:
            return None
        if stop[0] == self._quote:
            self._quote = ""
            return self._flushed() + '"', stop.end()
        found = _ESCAPE.match(text, at)
        if found is None:
            is_cut = len(text) - at < _LONGEST_ESCAPE
            return None if is_cut else (self._flushed() + "\\\\", at + 1)
        return self._character(found), found.end()

    def _character(self, found: re.Match[str]) -> str:
        code = int(found[1] or found[2] or found[3] or "0", 16)
        if 0xDC00 <= code < 0xE000 and self._half:
            pair, self._half = self._half + chr(code), ""
            return _escaped(pair.encode("utf-16", "surrogatepass").decode("utf-16"))
        before = self._flushed()
        if 0xD800 <= code < 0xDC00:
            self._half = chr(code)
            return before
        if found[4]:
            known = found[4] in "\"'\\/" or found[4] in _ESCAPED
            told = _ESCAPED.get(found[4], found[4]) if known else "\\" + found[4]
        else:
            told = chr(code) if code <= 0x10FFFF and not 0xDC00 <= code < 0xE000 else "\ufffd"
        return before + _escaped(told)

    def _flushed(self) -> str:
        half, self._half = self._half, ""
        return "\ufffd" if half else ""


class _Tagged:
    """Arguments between tags, up to the tag that closes the call."""

    def __init__(self, tags: Tags, closes: tuple[str, ...], schema: Any) -> None:
        self._tags, self._closes, self._schema = tags, closes, schema
        self._key = re.compile(tags.key, re.S)
        self._told = 0  # arguments
        self._state = "key"  # or "pad", "value"
        self._value: list[str] | None = None  # a value that is not text; None: it is text
        self._kinds: frozenset[str] = frozenset()
        self.is_done = self.is_broken = False

    def add(self, text: str, *, is_end: bool) -> tuple[str, str]:
        told: list[str] = []
        at = 0
        while not self.is_done and not self.is_broken:
            state = self._state
            read = {"key": self._begin, "pad": self._pad, "value": self._read}[state]
            step = read(text, at, is_end)
            if step is None:
                break
            told.append(step[0])
            if step[1] == at and state == self._state:
                break
            at = step[1]
        return "".join(told), text[at:]

    def _begin(self, text: str, at: int, is_end: bool) -> tuple[str, int] | None:
        at = _end(_SPACE, text, at)
        if text.startswith(self._closes, at):
            self.is_done = True
            return "}" if self._told else "{}", at
        reach = text.find(self._tags.reach, at, at + KEY)
        if reach < 0:
            rest = text[at : at + KEY]
            begins = (*self._closes, self._tags.begin)
            can = any(one.startswith(rest) for one in begins) or rest.startswith(self._tags.begin)
            if can and len(rest) < KEY:
                return None
        found = self._key.match(text, at)
        if found is None:
            self.is_broken = True
            return "" if self._told else "{", at
        key = found["key"].strip()
        said = found.groupdict().get("string")
        self._kinds = frozenset() if said else kinds(self._schema, key)
        is_text = said == "true" or self._kinds == {"string"}
        self._value, self._state, self._told = None if is_text else [], "pad", self._told + 1
        before = ", " if self._told > 1 else "{"
        return f"{before}{_quoted(key)}: " + ('"' if is_text else ""), found.end()

    def _pad(self, text: str, at: int, is_end: bool) -> tuple[str, int] | None:
        pad = self._tags.pad
        if len(text) - at < len(pad) and not is_end:
            return None
        self._state = "value"
        return "", at + (len(pad) if pad and text.startswith(pad, at) else 0)

    def _read(self, text: str, at: int, is_end: bool) -> tuple[str, int]:
        end, after = self._end(text, at, is_end)
        piece = text[at:end]
        if self._value is not None:
            self._value.append(piece)
            piece = "" if after is None else as_json("".join(self._value), self._kinds)
        else:
            piece = _escaped(piece) + ("" if after is None else '"')
        if after is None:
            return piece, end
        self._state = "key"
        return piece, after

    def _end(self, text: str, start: int, is_end: bool) -> tuple[int, int | None]:
        """Where the certain part of a value ends, and where its tag ends; None: not there yet.

        The tag counts where another tag follows it: values may contain its text.
        """
        tags, at = self._tags, start
        following = (tags.begin, *self._closes)
        while (found := text.find(tags.end, at)) >= 0:
            end, at = found, found + len(tags.end)
            if tags.pad and text.endswith(tags.pad, start, found):
                end -= len(tags.pad)
            rest = text[_end(_SPACE, text, at) :][:KEY]
            if rest.startswith(following) or (is_end and not rest):
                return end, at
            if any(one.startswith(rest) for one in following):
                return end, None
        held = max(held_back(text, tags.end), held_back(text, tags.pad + tags.end))
        return max(start, len(text) - held), None


def as_json(text: str, wanted: frozenset[str]) -> str:
    """A value of one of these types, as far as the text can be read as one; else the text."""
    stripped = text.strip()
    if stripped.lower() in ("true", "false") and "boolean" in wanted:
        return stripped.lower()
    try:
        value = read_json(stripped)
    except ValueError:
        reading = _PlainValue(PYTHON)
        told, rest = reading.add(f"(x={stripped})", is_end=True)
        if not reading.is_done or rest:
            return _quoted(text)
        value = json.loads(told)["x"]
    kind = _TYPES[type(value)]
    fits = not wanted or kind in wanted or (kind == "integer" and "number" in wanted)
    return (
        json.dumps(value, ensure_ascii=False) if fits or "string" not in wanted else _quoted(text)
    )


def kinds(schema: Any, key: str) -> frozenset[str]:
    """The types that a tool's schema allows for an argument; empty: any."""

    def of(one: Any, depth: int = 0) -> set[str]:
        if not isinstance(one, dict) or depth > 8:
            return set()
        place = one.get("$ref")
        if isinstance(place, str) and place.startswith("#/"):
            target: Any = schema
            for step in place[2:].split("/"):
                target = target.get(step) if isinstance(target, dict) else None
            return of(target, depth + 1)
        told = one.get("type")
        if told is not None:
            return set(told) if isinstance(told, list) else {told}
        values = [one["const"]] if "const" in one else one.get("enum") or ()
        found = {_TYPES[type(value)] for value in values}
        for name in ("anyOf", "oneOf", "allOf"):
            for part in one.get(name) or ():
                found |= of(part, depth + 1)
        return found

    properties = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(of(properties.get(key)) if isinstance(properties, dict) else ())


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _python_number(word: str) -> str | None:
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return json.dumps(value)
