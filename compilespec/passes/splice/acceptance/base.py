"""The interface of an acceptance rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from compilespec.passes.splice.builder import Splice


class Judged(NamedTuple):
    """The results of a rule, all int32.

    target: [B, S] (prefill: [R, 1]), the tokens of this step; those after the bonus are harmless
    ids, which the drafter may read.  emitted: the same, PAD after the bonus.  num_emitted: [B].
    """

    target: Tensor
    emitted: Tensor
    num_emitted: Tensor
    taken: Tensor | None = None
    """Of a tree: the rows of the accepted path, [B, P], 0 after them; the others are [B, P] then,
    along this path, P = K + 1.
    """


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Functions that write tensor code into a step; `ids` are [B, S], PAD for what must not be
    judged; the logits are the step's role.
    """

    lossless: bool | None  # None: as the program's rule function claims
    decode: Callable[[Splice, Tensor], Judged]  # step, ids
    prefill: Callable[[Splice], Judged]
    decode_tree: Callable[[Splice, Tensor], Judged] | None = None
    """`decode` of a tree; None: the rule judges chains alone."""
    after: Callable[[Splice, Judged], None] | None = None
    """In both phases: updates the rule's state with the emitted tokens."""
