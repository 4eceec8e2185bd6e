"""The drafting methods, one line each; a method's `capabilities` say what it needs."""

from __future__ import annotations

from compilespec.errors import UnknownMethod
from compilespec.errors.suggest import did_you_mean
from compilespec.methods import (
    auto,
    dflash,
    draft_model,
    dspark,
    eagle,
    eagle3,
    medusa,
    mtp,
    mtp_eagle,
    mtp_multi,
    ngram,
    none,
    peagle,
    save_hidden_states,
    self_draft,
    shared_kv,
    suffix,
    user,
)
from compilespec.methods.base import Method
from compilespec.methods.combined import combined_method

METHODS: tuple[Method, ...] = (
    none.METHOD,
    eagle3.METHOD,
    eagle.METHOD,
    peagle.METHOD,
    dflash.METHOD,
    dspark.METHOD,
    medusa.METHOD,
    mtp.METHOD,
    mtp_eagle.METHOD,
    mtp_multi.METHOD,
    shared_kv.METHOD,
    draft_model.METHOD,
    self_draft.METHOD,
    suffix.METHOD,
    ngram.METHOD,
    user.METHOD,
    save_hidden_states.METHOD,
    auto.METHOD,
)


def get_method(name: str | None) -> Method:
    """Find a method by its name or by TensorRT-LLM's name for it, in any case; None is "none".
    "suffix+eagle3" is a look-up with a model to fall back on (`methods/combined.py`).

    Raises:
        UnknownMethod: no such name; the message lists the known ones.
        InvalidOption: "a+b" of methods that do not go together.
    """
    if name is not None and not isinstance(name, str):
        raise UnknownMethod(f"spec: expected a method name, got {type(name).__name__}; {_known()}")
    wanted = "none" if name is None else name.strip().casefold()
    if "+" in wanted:
        return combined_method(*(get_method(part) for part in wanted.split("+")))
    for method in METHODS:
        if wanted in _spellings(method.capabilities.name, method.capabilities.aliases):
            return method
    names = [s for m in METHODS for s in _spellings(m.capabilities.name, m.capabilities.aliases)]
    cure = did_you_mean(name, [*method_names(), *names], "spec")
    raise UnknownMethod(f"unknown method {name!r}{cure or ';'} {_known()}")


def method_names() -> tuple[str, ...]:
    """Names of the methods."""
    return tuple(method.capabilities.name for method in METHODS)


def capability_rows() -> list[dict[str, object]]:
    """One row per method: its capabilities."""
    return [dict(vars(method.capabilities)) for method in METHODS]


def _spellings(name: str, aliases: tuple[str, ...]) -> set[str]:
    return {spelling.casefold() for spelling in (name, *aliases)}


def _known() -> str:
    return f"known methods: {', '.join(method_names())}"
