"""Static trees: the same paths in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.levels import Chosen
from compilespec.passes.drawn_trees import draws_children, sibling_ranks
from compilespec.passes.graph import emit, output_node
from compilespec.program import PAD, TreeShape


class StaticTree:
    """The same paths in every step."""

    def __init__(self, shape: TreeShape, ctx: PassContext) -> None:
        self._choices, self._device = shape.choices, ctx.config.device
        ranks = sibling_ranks(shape)  # draws come one after the other, whatever ranks are left out
        self._ranks = {
            path: ranks[path] if draws_children(ctx) else path[-1] for path in shape.choices
        }
        self._inner = {path[:-1] for path in shape.choices}
        self._level: list[tuple[int, ...]] = [()]  # the nodes that were run last
        self._keys: dict[tuple[int, ...], int] = {}  # of all nodes that were run
        self._drafts: list[fx.Node] = []

    def grow(
        self, gm: fx.GraphModule, scores: fx.Node, ids: fx.Node | None, *, is_last: bool,
        before: fx.Node,
    ) -> Chosen | None:  # fmt: skip
        depth = len(self._level[0]) + 1
        nodes = [path for path in self._choices if len(path) == depth]
        width = max(self._ranks[path] for path in nodes) + 1
        index = {path: number for number, path in enumerate(self._level)}
        picked = [index[path[:-1]] * width + self._ranks[path] for path in nodes]
        drafts = emit(
            gm, best_tokens, scores, *([] if ids is None else [ids]),
            before=before, picked=self._constant(gm, f"picked_{depth}", picked), width=width,
        )  # fmt: skip
        self._drafts.append(drafts)
        if is_last:
            return None
        level = [path for path in nodes if path in self._inner]
        for path in level:
            self._keys[path] = len(self._keys)
        ways = [[self._keys[path[:d]] for d in range(1, depth + 1)] for path in level]
        tokens, parent, way = emit(
            gm, chosen_nodes, drafts, before=before,
            kept=self._constant(gm, f"kept_{depth}", [nodes.index(path) for path in level]),
            parent=self._constant(gm, f"parent_{depth}", [index[path[:-1]] for path in level]),
            way=self._constant(gm, f"way_{depth}", ways),
        )  # fmt: skip
        self._level = level
        return Chosen(tokens, parent, way, len(level))

    def finish(self, gm: fx.GraphModule, *, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        number = {path: row for row, path in enumerate(((), *self._choices))}
        parents = [0, *(number[path[:-1]] for path in self._choices)]
        drafts, topology = emit(
            gm, static_result, *self._drafts, before=before,
            parents=self._constant(gm, "parents", parents),
        )  # fmt: skip
        return drafts, topology

    def _constant(self, gm: fx.GraphModule, name: str, values: Sequence[Any]) -> fx.Node:
        dtype = torch.int32 if name.startswith(("way", "parents")) else torch.int64
        buffer = f"tree_{name}"
        gm.register_buffer(
            buffer, torch.tensor(values, dtype=dtype, device=self._device), persistent=False
        )
        with gm.graph.inserting_before(output_node(gm)):
            return gm.graph.get_attr(buffer)


def best_tokens(scores_BFV: Any, ids_V: Any = None, *, picked: Any, width: int) -> Any:
    """The tokens [B, N] that are `picked` among the `width` best of each row, PAD for impossible
    ones.
    """
    best_BFW, place_BFW = scores_BFV.topk(width, -1)
    tokens_BFW = place_BFW if ids_V is None else ids_V[place_BFW]
    tokens_BFW = torch.where(best_BFW > -math.inf, tokens_BFW, PAD).to(torch.int32)
    return tokens_BFW.flatten(1).index_select(1, picked)


def chosen_nodes(drafts_BN: Any, *, kept: Any, parent: Any, way: Any) -> tuple[Any, Any, Any]:
    """Tokens, parents and paths of the nodes that go on: [B, F], [B, F] and [B, F, depth]."""
    tokens_BF = drafts_BN.index_select(1, kept)
    parent_BF = torch.zeros_like(tokens_BF).long() + parent
    return tokens_BF, parent_BF, torch.zeros_like(tokens_BF).unsqueeze(2) + way


def static_result(*drafts: Any, parents: Any) -> tuple[Any, Any]:
    drafts_BN = torch.cat(drafts, 1) if len(drafts) > 1 else drafts[0]
    return drafts_BN, torch.zeros_like(drafts_BN[:, :1]) + parents
