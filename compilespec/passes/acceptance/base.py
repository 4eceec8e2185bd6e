"""The interface of an acceptance rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from compilespec.passes.context import PassContext


class Judged(NamedTuple):
    """Nodes, all int32.

    target: [B, S] (prefill: [R, 1]), the tokens of this step; those after the bonus are harmless
    ids, which the drafter may read.  emitted: the same, PAD after the bonus.  num_emitted: [B].
    """

    target: fx.Node
    emitted: fx.Node
    num_emitted: fx.Node
    taken: fx.Node | None = None
    """Of a tree: the rows of the accepted path, [B, P], 0 after them; the others are [B, P] then,
    along this path, P = K + 1.
    """


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Functions that emit nodes before the output; `ids` and `logits` are [B, S] and [B, S, V]."""

    lossless: bool | None  # None: as the program's rule function claims
    decode: Callable[[fx.GraphModule, PassContext, fx.Node, fx.Node], Judged]  # ids, logits
    prefill: Callable[[fx.GraphModule, PassContext, fx.Node], Judged]  # logits, [1, R, V]
    decode_tree: Callable[[fx.GraphModule, PassContext, fx.Node, fx.Node], Judged] | None = None
    """`decode` of a tree; None: the rule judges chains alone."""
    after: Callable[[fx.GraphModule, PassContext, Judged], None] | None = None
    """In both phases: updates the rule's state with the emitted tokens."""
