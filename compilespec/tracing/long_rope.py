"""Rotary embeddings with two tables of frequencies, for short and for long sequences (LongRoPE).

transformers takes the table by the longest sequence of a call, so that requests of one batch would
change each other.  Here a request has the table for its length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from compilespec.errors import UnsupportedModel

_KIND = "longrope"


@dataclass
class LongRows:
    """The tables that the tokens of the traced call ask for."""

    is_long: Tensor | bool = False  # bool [B, T], or one answer for all


def short_rope_limit(model: nn.Module) -> int | None:
    """The longest sequence that the short table serves; None for models with one table."""
    found = [_limit(module, kind) for module, kind in _long_ropes(model)]
    return min(found, default=None)


@contextlib.contextmanager
def rope_by_request(model: nn.Module, rows: LongRows) -> Iterator[None]:
    """Let LongRoPE models rotate each token by the short or the long table, as `rows.is_long` says
    when the model is called, while the context is open.

    Raises: UnsupportedModel for frequencies that change with the length (dynamic NTK).
    """
    for module in model.modules():
        for kind, rope_type in _rope_types(module):
            if "dynamic" in rope_type:
                where = f" of its {kind} layers" if kind else ""
                raise UnsupportedModel(
                    f"{type(model).__name__}: rope_type {rope_type!r}{where} (dynamic NTK) changes "
                    "its frequencies as a sequence grows, so that cached keys would be wrong: "
                    "set rope_type='yarn', 'linear' or 'default' in the config's rope_parameters"
                )
    with contextlib.ExitStack() as stack:
        for module, kind in _long_ropes(model):
            name = f"{kind}_long_inv_freq" if kind else "long_inv_freq"
            stack.enter_context(_buffer(module, name, _long_table(module, kind)))
        for rope in {type(module) for module, _ in _long_ropes(model)}:
            patched = _by_request(_unwrapped(rope.forward), rows)
            stack.enter_context(mock.patch.object(rope, "forward", patched))
        yield


def _by_request(forward: Callable[..., Any], rows: LongRows) -> Callable[..., Any]:
    """A rotary embedding's own `forward`, over one table or both."""

    def both(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        prefix = f"{layer_type}_" if layer_type else ""
        options = {"layer_type": layer_type} if layer_type else {}
        rope_type = self.rope_type[layer_type] if layer_type else self.rope_type
        short = getattr(self, f"{prefix}original_inv_freq")
        is_long = rows.is_long
        if rope_type != _KIND or is_long is False:
            return _with_table(forward, self, prefix, short, x, position_ids, options)
        long = getattr(self, f"{prefix}long_inv_freq")
        far = _with_table(forward, self, prefix, long, x, position_ids, options)
        if is_long is True:
            return far
        near = _with_table(forward, self, prefix, short, x, position_ids, options)
        chosen = is_long[..., None]
        if isinstance(far, tuple):
            return tuple(torch.where(chosen, a, b) for a, b in zip(far, near, strict=True))
        return torch.where(chosen, far, near)

    return both


def _with_table(
    forward: Callable[..., Any],
    rope: Any,
    prefix: str,
    table: Tensor,
    x: Tensor,
    position_ids: Tensor,
    options: dict[str, str],
) -> Any:
    setattr(rope, f"{prefix}inv_freq", table)
    return forward(rope, x, position_ids, **options)


# --- the modules and their tables ---


def _rope_types(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(kind of layer, rope type) of a rotary embedding of transformers; the kind "" for all."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        yield "", rope_type
    elif isinstance(rope_type, dict):
        yield from ((str(kind), one) for kind, one in rope_type.items() if isinstance(one, str))


def _long_ropes(model: nn.Module) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        yield from ((module, kind) for kind, one in _rope_types(module) if one == _KIND)


def _parameters(module: Any, kind: str) -> dict[str, Any]:
    parameters: dict[str, Any] = module.config.rope_parameters
    return parameters[kind] if kind else parameters


def _limit(module: Any, kind: str) -> int:
    return int(_parameters(module, kind)["original_max_position_embeddings"])


def _long_table(module: Any, kind: str) -> Tensor:
    """The frequencies of sequences longer than the limit, as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    device = next(iter(module.buffers())).device
    options = {"layer_type": kind} if kind else {}
    length = _limit(module, kind) + 1
    return ROPE_INIT_FUNCTIONS[_KIND](module.config, device, seq_len=length, **options)[0]


@contextlib.contextmanager
def _buffer(module: Any, name: str, table: Tensor) -> Iterator[None]:
    """The temporary value of a module's buffer, in the place of one that transformers keeps
    there.
    """
    before = module.__dict__.pop(name, None)
    module.register_buffer(name, table, persistent=False)
    try:
        yield
    finally:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind its decorators, one of which chooses the table."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
