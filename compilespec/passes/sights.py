"""Lets tokens of a prompt see later ones: those of an image each other, in Gemma 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_input, emit
from compilespec.program import InputSpec

AHEAD = "ahead_T"  # how many later tokens each token of a prefill call sees


@dataclass(frozen=True, kw_only=True)
class Sights:
    """What attention is given where tokens see later ones, int32 [1, T]."""

    position: fx.Node  # each token's own
    last: fx.Node  # the last one that it sees
    path: fx.Node  # [1, T, 1], empty: all keys are in the caches

    def first(self, gm: fx.GraphModule, window: int, before: fx.Node) -> fx.Node:
        """The first position that each token sees: a window ends at the token itself."""
        node: fx.Node = emit(
            gm, lambda own: (own - (window - 1)).clamp(min=0), self.position, before=before
        )
        return node


def read_sights(
    gm: fx.GraphModule, ctx: PassContext, position: fx.Node, *, before: fx.Node
) -> Sights | None:
    """None where attention is causal: in a decode step, and of most models."""
    if not ctx.sees_ahead or ctx.phase != "prefill":
        return None
    ahead = add_input(gm, ctx, InputSpec(name=AHEAD, kind="batch"))
    last, path = emit(gm, look_ahead, position, ahead, before=before)
    return Sights(position=position, last=last, path=path)


def look_ahead(position_1T: Any, ahead_T: Any) -> tuple[Any, Any]:
    """The last position that each token sees, and paths of no tokens."""
    last_1T = position_1T + ahead_T.unsqueeze(0)
    return last_1T, torch.full_like(last_1T, -1).unsqueeze(2)
