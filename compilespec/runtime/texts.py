"""Checks of callers' texts: Unicode, depth of nesting, and excerpts for messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from compilespec.errors import InvalidRequest

MAX_SHOWN = 120  # characters of a value in a message
MAX_NESTING = 256  # mappings and lists inside each other; Python's limit is the process's


def shown(came: object) -> str:
    """The caller's value, cut where it is long."""
    text = repr(came)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def check_unicode(what: str, given: Any) -> None:
    """Refuse a text, or mappings and sequences of texts, with halves of surrogate pairs.  Python
    makes them of bytes that are no UTF-8 (in argv, in names of files), and of half an emoji.

    Raises: InvalidRequest.
    """
    for text in _texts(given):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{what} is no Unicode: character {error.start} is {text[error.start]!r}, a lone "
                "surrogate; expected text that UTF-8 can hold: decode the bytes that it came from "
                "as UTF-8, or replace it"
            ) from error


def is_nested_too_deep(given: Any) -> bool:
    """True where mappings and lists are nested more than MAX_NESTING levels deep."""
    level = [given]
    for _ in range(MAX_NESTING + 1):
        level = [value for one in level for value in _inside(one)]
        if not level:
            return False
    return True


def has_more_values(given: Any, most: int) -> bool:
    """True where mappings and lists hold more than `most` values; it stops there."""
    left, found = [given], 0
    while left and found <= most:
        inside = _inside(left.pop())
        found += len(inside)
        left += inside
    return found > most


def _inside(one: Any) -> Collection[Any]:
    """The values of a mapping, a list or a tuple."""
    if isinstance(one, Mapping):
        return one.values()
    return one if isinstance(one, list | tuple) else ()


def _texts(given: Any) -> Iterator[str]:
    """All texts in a value, for any depth of nesting."""
    left = [given]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
