"""Gives recurrences and causal convolutions the states of their requests, which survive rejection.

A state row holds a recurrence's state after the first `absorbed` tokens of its request, and what
the few tokens after them gave; see `ops.recurrence`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.program import MIXERS, marker_kind, markers

ABSORBED = "absorbed_R"  # tokens of each row's request that the target's states hold


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePlaces:
    """What tells the tokens of a call apart, [B, S] or [1, T]."""

    row: Tensor  # int32, -1: writes nothing
    position: Tensor  # int32
    absorbed: Tensor  # int32, tokens in the state of the token's request
    commits: Tensor  # bool, whether the token cannot be rejected any more


def keep_states(
    step: Splice,
    owner: str,
    places: StatePlaces,
    numbers: Mapping[str, Sequence[int]] | None = None,
) -> int:
    """Rewrite the recurrent markers of a graph, in order, onto the state rows of `owner`.

    Args: numbers: those of the states that each kind of marker uses; None: 0, 1, ...
    """
    found = markers(step.gm, "recurrence", "causal_conv")
    numbered = {kind: iter(numbers[kind]) if numbers else itertools.count() for kind in MIXERS}
    for marker in found:
        kind = str(marker_kind(marker))
        name = f"{kind}.{owner}.{next(numbered[kind])}"
        rewrite = _keep_state if kind == "recurrence" else _keep_window
        with step.before(marker):
            kept = rewrite(step, marker, name, places)
        step.take_place(marker, kept)
    return len(found)


def _keep_state(step: Splice, marker: fx.Node, name: str, at: StatePlaces) -> Tensor:
    query, key, value, decay, beta, kind = step.values(marker.args)
    sizes = [_sizes(part, name) for part in (key, value, decay, beta) if part is not None]
    (_, key_dim), (heads, value_dim) = sizes[0], sizes[1]
    dtype, count = _dtype(value), num_kept_tokens(step.ctx)
    state = step.state(f"{name}.state", (heads, key_dim, value_dim), dtype)
    recent = step.state(f"{name}.recent", (count, sum(map(math.prod, sizes))), dtype)
    kept: Tensor = torch.ops.compilespec.cached_recurrence.default(
        query,
        key,
        value,
        decay,
        beta,
        state,
        recent,
        at.row,
        at.position,
        at.absorbed,
        at.commits,
        kind,
    )
    return kept


def _keep_window(step: Splice, marker: fx.Node, name: str, at: StatePlaces) -> Tensor:
    x, weight, bias = step.values(marker.args)
    (channels,) = _sizes(x, name)
    width = int(_shape(weight, name)[-1] or 0) - 1 + num_kept_tokens(step.ctx)
    ring = step.state(f"{name}.recent", (width, channels), _dtype(x))
    kept: Tensor = torch.ops.compilespec.cached_conv.default(
        x, weight, bias, ring, at.row, at.position
    )
    return kept


def num_kept_tokens(ctx: PassContext) -> int:
    """Tokens that a step may leave behind which the next one may reject: K of the largest step,
    and as many that a drafter in place writes after those that were accepted.
    """
    return max(1, (ctx.config.num_row_tokens - 1) * (2 if ctx.drafts_in_place else 1))


def _shape(part: Tensor, name: str) -> tuple[int | None, ...]:
    example = node_of(part).meta.get("example")
    if example is None:
        raise PassError(f"{name}: an argument of the marker has no known shape")
    shape: tuple[int | None, ...] = example[0]
    return shape


def _sizes(part: Tensor, name: str) -> tuple[int, ...]:
    """The sizes of one token."""
    return tuple(int(size or 0) for size in _shape(part, name)[2:])


def _dtype(part: Tensor) -> torch.dtype:
    dtype: torch.dtype = node_of(part).meta["example"][1]
    return dtype
