"""Trees of drafts, grown by a drafter level by level: static forms, and the most probable paths.

Each pass of the drafter runs the nodes of one depth that go on, F of them, and gives the scores of
what may follow each.  A node's keys are the call's own or those of passes before, by its path;
nothing of it is written to a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from compilespec.errors import DraftMismatch
from compilespec.passes.context import PassContext
from compilespec.passes.graph import arange_like, emit, find_role, output_node, splice
from compilespec.passes.insert_paged_attention import Branches
from compilespec.passes.kv_groups import Metadata
from compilespec.passes.read_state import place
from compilespec.passes.sampling import draft_noise, wide_dtype
from compilespec.program import PAD, Traced, TreeShape
from compilespec.tracing.capture import output_widths


class Level(NamedTuple):
    """Nodes of one depth that go on: F of each request."""

    ids: fx.Node  # int32 [B, F], target ids, PAD where there is none
    parent: fx.Node  # int64 [B, F]: which node of the level before
    metadata: Metadata  # for their attention; their slots are -1
    branches: Branches


class Growth(NamedTuple):
    """How a drafter goes on from its last committed row.

    first: [B], the position of the level of depth 1 in the drafter.  drawn: [B], the position that
    drafts of depth 1 are drawn for.  advance: the drafter's pass over a level; gives what its head
    takes, [B, F, D].
    """

    first: fx.Node
    drawn: fx.Node
    advance: Callable[[Level], fx.Node]


def grow_tree(
    gm: fx.GraphModule, ctx: PassContext, head: fx.Node, argument: str, growth: Growth
) -> int:
    """Make the roles `drafts`, [B, num_nodes], and `parents`, [B, num_nodes + 1].

    Args:
        head: what "propose" takes, of the last committed row, [B, 1, D]; argument: by which name.
    Returns: passes of the drafter over levels.
    """
    shape, end = ctx.config.tree, output_node(gm)
    assert shape is not None, "checked by the caller"
    grower: _Grower = _Static(shape, ctx) if shape.choices else _Dynamic(shape)
    num_rows, num_keys = 1, 0
    branches: Branches | None = None
    for depth in range(1, shape.depth + 1):
        scores, ids = _scores(gm, ctx, head, argument, growth, num_rows, depth)
        more = grower.grow(gm, scores, ids, is_last=depth == shape.depth, before=end)
        if more is None:
            break
        tokens, parent, path, num_rows = more
        num_keys += num_rows
        metadata = _places(gm, ctx, growth, depth, num_rows, num_keys)
        branches = Branches(path=path, earlier=branches.earlier if branches else {})
        head = growth.advance(Level(tokens, parent, metadata, branches))
    drafts, parents = grower.finish(gm, before=end)
    drafts.meta["role"], parents.meta["role"] = "drafts", "parents"
    return shape.depth - 1


def parents_hidden(gm: fx.GraphModule, level: Level, hidden: fx.Node, width: int) -> fx.Node:
    """Of the level before, the hidden states [B, F, D] that a level's nodes follow."""
    node: fx.Node = emit(
        gm, lambda x, parent_BF: x.gather(1, parent_BF.unsqueeze(2).expand(-1, -1, width)), hidden,
        level.parent, before=output_node(gm),
    )  # fmt: skip
    return node


def check_drafter(propose: Traced, shape: TreeShape, name: str) -> None:
    """Whether a drafter can grow the tree.  Raises: DraftMismatch."""
    widths = output_widths(propose)
    if len(widths) < 2:
        raise DraftMismatch(
            f"draft_tree= needs a drafter with logits, whose best tokens are the branches; that of "
            f"spec={name!r} offers none: define `logits` beside `propose`, or leave draft_tree= out"
        )
    most = max(shape.top_k, max((rank + 1 for path in shape.choices for rank in path), default=0))
    if most > widths[1]:
        raise DraftMismatch(
            f"draft_tree= takes the {most} best tokens of a node, and the drafter knows "
            f"{widths[1]}; give fewer"
        )


# --- scores, places ---


def _scores(
    gm: fx.GraphModule, ctx: PassContext, head: fx.Node, argument: str, growth: Growth,
    num_rows: int, depth: int,
) -> tuple[fx.Node, fx.Node | None]:  # fmt: skip
    """The scores [B, F, Vd] of what follows each row, and their target ids if the drafter has a
    vocabulary of its own.
    """
    end = output_node(gm)
    rows = emit(gm, lambda x_BFD: x_BFD.flatten(0, 1), head, before=end)
    _, logits, *ids = splice(gm, ctx, ctx.draft["propose"], {argument: rows})
    drawn = emit(gm, lambda drawn_B: drawn_B + (depth - 1), growth.drawn, before=end)
    width = output_widths(ctx.draft["propose"])[1]
    noise = draft_noise(gm, ctx, drawn, ids[0] if ids else None, width)
    scores = emit(
        gm, node_scores, logits, *noise, before=end, num_rows=num_rows, dtype=wide_dtype(ctx)
    )
    if ids:
        scores = emit(
            gm, lambda x, ids_V: torch.where(ids_V >= 0, x, -math.inf), scores, ids[0], before=end
        )
    return scores, ids[0] if ids else None


def node_scores(
    logits_NV: Any, temperature_B: Any = None, noise_BV: Any = None, *, num_rows: int,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """[B, F, V]: the logits, of sampled requests at their temperature, with the noise with which
    the target will draw.
    """
    logits_BFV = logits_NV.unflatten(0, (-1, num_rows)).to(dtype)
    if noise_BV is None:
        return logits_BFV
    return logits_BFV / temperature_B.view(-1, 1, 1).to(dtype) + noise_BV.unsqueeze(1).to(dtype)


def _places(
    gm: fx.GraphModule, ctx: PassContext, growth: Growth, depth: int, num_rows: int, num_keys: int
) -> Metadata:
    table = find_role(gm, "block_table_RM")
    position, row, slot = emit(
        gm, level_places, growth.first, find_role(gm, "row_index"), find_role(gm, "live"), table,
        before=output_node(gm), ahead=depth - 1, num_rows=num_rows, num_keys=num_keys,
        max_seq_len=ctx.config.max_seq_len, block_size=ctx.config.block_size,
    )  # fmt: skip
    return slot, row, position, table


def level_places(
    first_B: Any, index_B: Any, live_B: Any, block_table_RM: Any, *, ahead: int, num_rows: int,
    num_keys: int, max_seq_len: int, block_size: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Position and row of a level's nodes, [B, F], and slots of their keys, [B, J]: -1."""
    row_B = torch.where(live_B, index_B, -1).to(torch.int32)
    wanted_BF = (first_B + ahead).unsqueeze(1) + torch.zeros_like(arange_like(first_B, num_rows))
    position, row, _ = place(
        wanted_BF, row_B.unsqueeze(1), index_B.unsqueeze(1), live_B.unsqueeze(1), block_table_RM,
        max_seq_len=max_seq_len, block_size=block_size,
    )  # fmt: skip
    slot = torch.full_like(first_B.unsqueeze(1).expand(-1, num_keys), -1, dtype=torch.int32)
    return position, row, slot


# --- forms ---

More = tuple[fx.Node, fx.Node, fx.Node, int]  # ids, parents and paths of nodes that go on; F


class _Grower(Protocol):
    def grow(
        self, gm: fx.GraphModule, scores: fx.Node, ids: fx.Node | None, *, is_last: bool,
        before: fx.Node,
    ) -> More | None:  # fmt: skip
        """Choose the nodes of the next depth from the scores of what follows each row."""

    def finish(self, gm: fx.GraphModule, *, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Drafts and parents."""


class _Static:
    """The same paths in every step."""

    def __init__(self, shape: TreeShape, ctx: PassContext) -> None:
        self._choices, self._device = shape.choices, ctx.config.device
        self._inner = {path[:-1] for path in shape.choices}
        self._level: list[tuple[int, ...]] = [()]  # the nodes that were run last
        self._keys: dict[tuple[int, ...], int] = {}  # of all nodes that were run
        self._drafts: list[fx.Node] = []

    def grow(
        self, gm: fx.GraphModule, scores: fx.Node, ids: fx.Node | None, *, is_last: bool,
        before: fx.Node,
    ) -> More | None:  # fmt: skip
        depth = len(self._level[0]) + 1
        nodes = [path for path in self._choices if len(path) == depth]
        width = max(path[-1] for path in nodes) + 1
        index = {path: number for number, path in enumerate(self._level)}
        picked = [index[path[:-1]] * width + path[-1] for path in nodes]
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
        return tokens, parent, way, len(level)

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


class _Dynamic:
    """The most probable paths.  Source: Li et al. 2024 (EAGLE-2), section 4."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape, self._depth = shape, 0
        self._scores: list[fx.Node] = []  # of all that was drafted, by depth: [B, ..]
        self._tokens: list[fx.Node] = []
        self._parents: list[fx.Node] = []  # by their place among all that was drafted; -1: the root
        self._last: tuple[fx.Node, ...] = ()  # of the nodes that were run: scores, places, paths

    def grow(
        self, gm: fx.GraphModule, scores: fx.Node, ids: fx.Node | None, *, is_last: bool,
        before: fx.Node,
    ) -> More | None:  # fmt: skip
        width = self._shape.top_k
        summed, tokens, parents = emit(
            gm, continuations, scores, *self._last[:2], before=before, width=width,
            ids=ids,
        )  # fmt: skip
        self._scores.append(summed)
        self._tokens.append(tokens)
        self._parents.append(parents)
        if is_last:
            return None
        drafted = 0 if self._depth == 0 else width + (self._depth - 1) * width**2
        chosen, chosen_ids, parent, place, path = emit(
            gm, most_probable, summed, tokens, *self._last[2:], before=before, width=width,
            num_before=drafted, num_keys=self._depth * width,
        )  # fmt: skip
        self._last = (chosen, place, path)
        self._depth += 1
        return chosen_ids, parent, path, width

    def finish(self, gm: fx.GraphModule, *, before: fx.Node) -> tuple[fx.Node, fx.Node]:
        scores, tokens, parents = (
            emit(gm, lambda *parts: torch.cat(parts, 1), *parts, before=before)
            for parts in (self._scores, self._tokens, self._parents)
        )
        drafts, topology = emit(
            gm, best_nodes, scores, tokens, parents, before=before,
            num_nodes=self._shape.num_nodes,
        )  # fmt: skip
        return drafts, topology


def continuations(
    scores_BFV: Any, before_BF: Any = None, place_BF: Any = None, *, width: int, ids: Any
) -> tuple[Any, Any, Any]:
    """The `width` best continuations of each row: the log-probability of their paths, tokens and
    parents, each [B, F * width].
    """
    best_BFW, id_BFW = scores_BFV.log_softmax(-1).topk(width, -1)
    if before_BF is not None:
        best_BFW = best_BFW + before_BF.unsqueeze(2)
    best_BFW = torch.where(best_BFW.isnan(), -math.inf, best_BFW)
    tokens_BFW = id_BFW if ids is None else ids[id_BFW]
    tokens_BFW = torch.where(best_BFW > -math.inf, tokens_BFW, PAD).to(torch.int32)
    nothing_BFW = torch.zeros_like(tokens_BFW)
    parents_BFW = nothing_BFW - 1 if place_BF is None else nothing_BFW + place_BF.unsqueeze(2)
    return best_BFW.flatten(1), tokens_BFW.flatten(1), parents_BFW.flatten(1)


def most_probable(
    scores_BN: Any, tokens_BN: Any, path_BFd: Any = None, *, width: int, num_before: int,
    num_keys: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Of a depth's continuations the `width` most probable ones: their scores and tokens, their
    parents among the nodes run last, their places among all continuations, and their paths by the
    keys of the runs, `num_keys` so far.
    """
    best_BW, index_BW = scores_BN.topk(width, 1)
    parent_BW = index_BW // width if path_BFd is not None else torch.zeros_like(index_BW)
    key_BW1 = (torch.zeros_like(index_BW) + (arange_like(index_BW, width) + num_keys)).unsqueeze(2)
    path = key_BW1.to(torch.int32)
    if path_BFd is not None:
        count = num_keys // width
        earlier = path_BFd.gather(1, parent_BW.unsqueeze(2).expand(-1, -1, count))
        path = torch.cat([earlier, path], 2)
    place_BW = (index_BW + num_before).to(torch.int32)
    return best_BW, tokens_BN.gather(1, index_BW), parent_BW, place_BW, path


def best_nodes(
    scores_BC: Any, tokens_BC: Any, parents_BC: Any, *, num_nodes: int
) -> tuple[Any, Any]:
    """The drafts [B, N] whose paths are the most probable, in the order in which they were drafted,
    and the parents [B, N + 1] of the rows.

    Of equal ones the first drafted is better, so that a node never goes without its parent.
    """
    order_BC = scores_BC.sort(dim=1, descending=True, stable=True)[1]
    index_BN = order_BC[:, :num_nodes].sort(dim=1)[0]
    parent_BN = parents_BC.gather(1, index_BN).long()
    is_before_BNN = index_BN.unsqueeze(1) < parent_BN.unsqueeze(2)
    row_BN = torch.where(parent_BN < 0, 0, is_before_BNN.sum(-1) + 1).to(torch.int32)
    return tokens_BC.gather(1, index_BN), torch.cat([torch.zeros_like(row_BN[:, :1]), row_BN], 1)
