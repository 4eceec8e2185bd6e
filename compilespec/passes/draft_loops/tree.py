"""Trees of drafts, grown level by level.

Each depth takes the scores of what may follow the nodes of the one before that go on, F of them: of
a pass of the drafter over these, or of a head that knows no node.  In a pass, a node's keys are the
call's own or those of passes before, by its path; nothing of it is written to a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from compilespec.errors import DraftMismatch
from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.dynamic_tree import DynamicTree
from compilespec.passes.draft_loops.levels import Chosen, Grower, Level
from compilespec.passes.draft_loops.static_tree import StaticTree
from compilespec.passes.drawn_trees import (
    child_noise,
    child_probs,
    draws_children,
    keep_child_probs,
)
from compilespec.passes.graph import (
    arange_like,
    emit,
    find_role,
    output_node,
    splice,
)
from compilespec.passes.insert_paged_attention import Branches
from compilespec.passes.kv_groups import Metadata
from compilespec.passes.read_state import place
from compilespec.passes.sampling import head_width, wide_dtype
from compilespec.program import Traced, TreeShape
from compilespec.tracing.capture import output_widths

# The logits [B * F, Vd] of what follows nodes, and their target ids if the drafter has a vocabulary
# of its own.
Logits = tuple[fx.Node, fx.Node | None]
Follow = Callable[[int, Chosen | None], Logits]


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
    """`grow_levels` by a drafter that runs the nodes of each level.

    Args:
        head: what "propose" takes, of the last committed row, [B, 1, D]; argument: by which name.
    Returns: passes of the drafter over levels.
    """
    num_keys = 0
    branches: Branches | None = None

    def follow(depth: int, level: Chosen | None) -> Logits:
        nonlocal head, num_keys, branches
        if level is not None:
            num_keys += level.num
            metadata = _places(gm, ctx, growth, depth - 1, level.num, num_keys)
            branches = Branches(path=level.path, earlier=branches.earlier if branches else {})
            head = growth.advance(Level(level.ids, level.parent, metadata, branches))
        return _logits(gm, ctx, head, argument)

    return grow_levels(gm, ctx, growth.drawn, follow)


def grow_levels(gm: fx.GraphModule, ctx: PassContext, drawn: fx.Node, follow: Follow) -> int:
    """Make the roles `drafts`, [B, num_nodes], and `parents`, [B, num_nodes + 1].

    Args:
        drawn: [B], the position that drafts of depth 1 are drawn for.
        follow: the logits of a depth's drafts after each node that was chosen before, F of them;
            after the last committed row, if None was.
    Returns: levels after the first.
    """
    shape, end = ctx.config.tree, output_node(gm)
    assert shape is not None, "checked by the caller"
    grower: Grower = StaticTree(shape, ctx) if shape.choices else DynamicTree(shape)
    level: Chosen | None = None
    distributions: list[fx.Node] = []
    for depth in range(1, shape.depth + 1):
        logits, ids = follow(depth, level)
        num_rows = 1 if level is None else level.num
        scores = _scores(gm, ctx, logits, ids, drawn, num_rows, depth)
        if draws_children(ctx):
            distributions.append(child_probs(gm, ctx, logits, ids, num_rows))
        level = grower.grow(gm, scores, ids, is_last=depth == shape.depth, before=end)
    if distributions:
        keep_child_probs(gm, ctx, distributions)
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


def check_drafter(propose: Traced, shape: TreeShape, name: str, num_kept: int | None) -> None:
    """Whether a drafter, of whose head `num_kept` rows are left, can grow the tree.

    Raises: DraftMismatch.
    """
    widths = output_widths(propose)
    if len(widths) < 2:
        raise DraftMismatch(
            f"draft_tree= needs a drafter with logits, whose best tokens are the branches; that of "
            f"spec={name!r} offers none: define `logits` beside `propose`, or leave draft_tree= out"
        )
    most = max(shape.top_k, max((rank + 1 for path in shape.choices for rank in path), default=0))
    known = min(widths[1], num_kept or widths[1])
    if most > known:
        raise DraftMismatch(
            f"draft_tree= takes the {most} best tokens of a node, and the drafter knows {known}; "
            "give fewer"
        )


# --- scores, places ---


def _logits(gm: fx.GraphModule, ctx: PassContext, head: fx.Node, argument: str) -> Logits:
    """What follows each row, by the drafter's one head."""
    end = output_node(gm)
    rows = emit(gm, lambda x_BFD: x_BFD.flatten(0, 1), head, before=end)
    _, logits, *ids = splice(gm, ctx, ctx.draft["propose"], {argument: rows})
    return logits, ids[0] if ids else None


def _scores(
    gm: fx.GraphModule, ctx: PassContext, logits: fx.Node, ids: fx.Node | None, drawn: fx.Node,
    num_rows: int, depth: int,
) -> fx.Node:  # fmt: skip
    """The scores [B, F, Vd] by which what follows each row is chosen."""
    end = output_node(gm)
    drawn = emit(gm, lambda drawn_B: drawn_B + (depth - 1), drawn, before=end)
    width = head_width(ctx)
    noise = child_noise(gm, ctx, drawn, ids, width, depth)
    scores: fx.Node = emit(
        gm, node_scores, logits, *noise, before=end, num_rows=num_rows, dtype=wide_dtype(ctx)
    )
    if ids is not None:
        scores = emit(
            gm, lambda x, ids_V: torch.where(ids_V >= 0, x, -math.inf), scores, ids, before=end
        )
    return scores


def node_scores(
    logits_NV: Any, temperature_B: Any = None, noise_BV: Any = None, *, num_rows: int,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """[B, F, V]: the logits, of sampled requests at their temperature, with the noise by which
    their drafts are drawn, if they are.
    """
    scores_BFV = logits_NV.unflatten(0, (-1, num_rows)).to(dtype)
    if temperature_B is not None:
        scores_BFV = scores_BFV / temperature_B.view(-1, 1, 1).to(dtype)
    return scores_BFV if noise_BV is None else scores_BFV + noise_BV.unsqueeze(1).to(dtype)


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
