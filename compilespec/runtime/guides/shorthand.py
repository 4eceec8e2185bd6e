"""The shorthands that callers may write in place of a guide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compilespec.errors import InvalidRequest
from compilespec.runtime.guides.base import Guide
from compilespec.runtime.guides.choice import Choice
from compilespec.runtime.guides.grammar import JsonSchema, Regex


def as_guide(value: Any) -> Guide:
    """A guide as it is; a mapping is a JSON schema, a string a regular expression, a sequence the
    options of a choice.

    Raises: InvalidRequest.
    """
    if hasattr(value, "matcher"):
        guide: Guide = value
        return guide
    if isinstance(value, Mapping):
        return JsonSchema(value)
    if isinstance(value, str):
        return Regex(value)
    if isinstance(value, Sequence):
        return Choice(value)
    raise InvalidRequest(
        "SamplingParams.guide: expected a JsonSchema, a Regex, a Choice, or a mapping, a string or "
        f"a sequence that stands for one; got a {type(value).__name__}"
    )
