"""Static trees: the same paths in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.tree_parts import Chosen
from compilespec.passes.splice.drawn_trees import draws_children, sibling_ranks
from compilespec.program import PAD, TreeShape


class StaticTree:
    """The same paths in every step."""

    def __init__(self, shape: TreeShape, ctx: PassContext) -> None:
        self._choices, self._device = shape.choices, ctx.config.device
        ranks = sibling_ranks(
            shape
        )  # draws come one after the other, also where ranks are left out
        self._ranks = {
            path: ranks[path] if draws_children(ctx) else path[-1] for path in shape.choices
        }
        self._inner = {path[:-1] for path in shape.choices}
        self._last: list[tuple[int, ...]] = [()]  # the nodes that were run last
        self._keys: dict[tuple[int, ...], int] = {}  # of all nodes that were run
        self._drafts: list[Tensor] = []

    def grow(
        self, step: Splice, scores: Tensor, ids: Tensor | None, *, is_last: bool
    ) -> Chosen | None:
        depth = len(self._last[0]) + 1
        nodes = [path for path in self._choices if len(path) == depth]
        width = max(self._ranks[path] for path in nodes) + 1
        index = {path: number for number, path in enumerate(self._last)}
        picked = [index[path[:-1]] * width + self._ranks[path] for path in nodes]
        drafts = best_tokens(
            scores, ids, picked=self._constant(step, f"picked_{depth}", picked), width=width
        )
        self._drafts.append(drafts)
        if is_last:
            return None
        inner = [path for path in nodes if path in self._inner]
        for path in inner:
            self._keys[path] = len(self._keys)
        ways = [[self._keys[path[:d]] for d in range(1, depth + 1)] for path in inner]
        tokens, parent, way = chosen_nodes(
            drafts,
            kept=self._constant(step, f"kept_{depth}", [nodes.index(path) for path in inner]),
            parent=self._constant(step, f"parent_{depth}", [index[path[:-1]] for path in inner]),
            way=self._constant(step, f"way_{depth}", ways),
        )
        self._last = inner
        return Chosen(tokens, parent, way, len(inner))

    def finish(self, step: Splice) -> tuple[Tensor, Tensor]:
        number = {path: row for row, path in enumerate(((), *self._choices))}
        parents = [0, *(number[path[:-1]] for path in self._choices)]
        return static_result(*self._drafts, parents=self._constant(step, "parents", parents))

    def _constant(self, step: Splice, name: str, values: Sequence[Any]) -> Tensor:
        dtype = torch.int32 if name.startswith(("way", "parents")) else torch.int64
        tensor = torch.tensor(values, dtype=dtype, device=self._device)
        return step.constant(f"tree_{name}", tensor)


def best_tokens(
    scores_BFV: Tensor, ids_V: Tensor | None = None, *, picked: Tensor, width: int
) -> Tensor:
    """The tokens [B, N] that are `picked` among the `width` best of each row, PAD for impossible
    ones.
    """
    best_BFW, place_BFW = scores_BFV.topk(width, -1)
    tokens_BFW = place_BFW if ids_V is None else ids_V[place_BFW]
    tokens_BFW = torch.where(best_BFW > -math.inf, tokens_BFW, PAD).to(torch.int32)
    return tokens_BFW.flatten(1).index_select(1, picked)


def chosen_nodes(
    drafts_BN: Tensor, *, kept: Tensor, parent: Tensor, way: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and paths of the nodes that go on: [B, F], [B, F] and [B, F, depth]."""
    tokens_BF = drafts_BN.index_select(1, kept)
    parent_BF = torch.zeros_like(tokens_BF).long() + parent
    return tokens_BF, parent_BF, torch.zeros_like(tokens_BF).unsqueeze(2) + way


def static_result(*drafts: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    drafts_BN = torch.cat(drafts, 1) if len(drafts) > 1 else drafts[0]
    return drafts_BN, torch.zeros_like(drafts_BN[:, :1]) + parents
