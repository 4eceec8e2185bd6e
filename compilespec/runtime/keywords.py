"""Keywords that an engine's calls do not take: most belong into SamplingParams."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from compilespec.errors import InvalidRequest
from compilespec.errors.suggest import meant
from compilespec.runtime.sampling_params import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")
FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def check_keywords(call: Callable[P, R]) -> Callable[P, R]:
    """Make a call refuse unknown keywords with InvalidRequest, which names the cure."""
    own = tuple(name for name in inspect.signature(call).parameters if name != "self")

    @functools.wraps(call)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        for name, value in keywords.items():
            if name not in own:
                raise _unknown(call.__name__, own, name, value)
        return call(*args, **keywords)

    return checked


def _unknown(call: str, own: tuple[str, ...], name: str, value: object) -> InvalidRequest:
    what = f"{call}() has no keyword {name!r}"
    if name not in FIELDS and (ours := meant(name, own, "generate")):
        return InvalidRequest(f"{what}; did you mean {ours}?")
    field = name if name in FIELDS else meant(name, FIELDS, "SamplingParams")
    if not field:
        return InvalidRequest(f"{what}; it takes {', '.join(own)}")
    if field not in FIELDS:  # with a remark: the value is of another kind
        return InvalidRequest(f"{what}; did you mean, in SamplingParams, {field}?")
    text = repr(value) if isinstance(value, int | float | str) else "..."
    return InvalidRequest(f"{what}; put it into SamplingParams({field}={text})")
