"""The inputs and results of a pass's reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, fx

from compilespec.passes.context import PassContext
from compilespec.program import Phase, StepKey

# Called for the i-th marker of its kind in a graph with the marker's arguments.
Attention = Callable[[int, tuple[Any, ...]], Tensor]
Mixers = Mapping[str, Attention]  # by kind of marker, see `program.MARKERS`
# Called with each operation's node, arguments and result; returns the result to go on with.
Follow = Callable[[fx.Node, tuple[Any, ...], Any], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a graph: every state buffer, cache and batch input by name."""

    name: str  # "5 rows, 1 padded"
    key: StepKey
    batch_size: int  # rows of the call, padded ones included
    inputs: Mapping[str, Tensor]

    @property
    def phase(self) -> Phase:
        return self.key.phase


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Attention metadata of a call's tokens, int32, [B, S] or [1, T]."""

    position: Tensor
    row: Tensor
    slot: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """One paged attention: the cache it writes its keys to, its tokens, and their keys."""

    cache: str
    tokens: Tokens
    key: Tensor | None = None  # None if the reference does not check it
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Values:
    """The values that a graph computed, or must compute, in one call."""

    outputs: Mapping[str, Tensor]
    roles: Mapping[str, Tensor] = field(default_factory=dict)  # values of the nodes with a role
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # after the call
    calls: Sequence[AttentionCall] = ()  # calls of paged attention, in order
    rounded: Collection[str] = ()  # buffers that a reference computes from products of fewer rows
    nodes: Mapping[str, Any] = field(default_factory=dict, repr=False)  # every node, by name


class Before(Protocol):
    """The graph before a pass, run operator by operator on copies of the inputs."""

    graph: fx.Graph

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        mixers: Mixers | None = None,
        *,
        follow: Follow | None = None,
    ) -> Values: ...


Reference = Callable[[Before, "PassContext", Case], Values]
