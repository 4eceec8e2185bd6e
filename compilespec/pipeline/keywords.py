"""Keywords of a call that are the fields of a record: written, documented and checked only
there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from compilespec.errors import InvalidOption, is_integer

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, Any], None]  # takes a keyword's name and value; raises InvalidOption

MARK = "        {keywords}\n"  # in a docstring: where the fields are described
WIDTH = 100


def keyword(default: Any, doc: str, check: Check | None = None, *, shown: bool = True) -> Any:
    """A field of a record of keywords.

    Args:
        doc: whole sentences, shown by `help`.
        check: refuses wrong values.
        shown: true if the call that takes it shows it as a keyword.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check, "shown": shown})


def check_fields(record: Any) -> None:
    """Run the check of every field.  Raises: InvalidOption."""
    for field in dataclasses.fields(record):
        if (check := field.metadata["check"]) is not None:
            check(field.name, getattr(record, field.name))


def shown_fields(record: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(record) if field.metadata["shown"])


def shows(record: type[Any]) -> Callable[[F], F]:
    """Complete the signature and the docstring of a function whose `**keywords` are the fields of
    `record`, and options of a method.  The function's behaviour does not change.
    """

    def complete(function: F) -> F:
        own = inspect.signature(function)
        *named, rest = own.parameters.values()
        fields = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                annotation=field.type,
            )
            for field in shown_fields(record)
        ]  # fmt: skip
        parameters = [*named, *fields, rest.replace(name="method_options", annotation="Any")]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # as with python -OO
            function.__doc__ = with_fields(function.__doc__, record)
        return function

    return complete


def with_fields(doc: str, record: type[Any]) -> str:
    """The docstring with the fields at `MARK`; Python 3.13 takes a level of indentation away."""
    if MARK in doc:
        return doc.replace(MARK, describe_fields(record))
    return doc.replace(MARK[4:], re.sub("^    ", "", describe_fields(record), flags=re.MULTILINE))


def describe_fields(record: type[Any]) -> str:
    """The fields as entries of a docstring's "Args"."""
    indents = {"initial_indent": " " * 8, "subsequent_indent": " " * 12}
    entries = [f"{field.name}: {field.metadata['doc']}" for field in shown_fields(record)]
    return "".join(f"{textwrap.fill(entry, WIDTH, **indents)}\n" for entry in entries)  # type: ignore[arg-type]


def positive(name: str, value: Any) -> None:
    if not is_integer(value) or value < 1:
        raise InvalidOption(f"{name} must be a positive integer; got {value!r}")


def positive_or_none(name: str, value: Any) -> None:
    if value is not None:
        positive(name, value)


def switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidOption(f"{name} must be True or False; got {value!r}")


def auto_or_switch(name: str, value: Any) -> None:
    if value != "auto" and not isinstance(value, bool):
        raise InvalidOption(f"{name} must be 'auto', True or False; got {value!r}")


def function_or_none(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise InvalidOption(f"{name} must be a function or a module; got {value!r}")
