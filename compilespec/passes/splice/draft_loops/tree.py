"""Trees of drafts, grown depth by depth.

Each depth takes the scores of what may follow the nodes of the one before that go on, F of them: of
a pass of the drafter over these, or of a head that knows no node.  In a pass, a node's keys are the
call's own or those of passes before, by its path; nothing of it is written to a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compilespec.errors import DraftMismatch
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.dynamic_tree import DynamicTree
from compilespec.passes.splice.draft_loops.static_tree import StaticTree
from compilespec.passes.splice.draft_loops.tree_parts import Chosen, Grower, TreeNodes
from compilespec.passes.splice.drawn_trees import (
    child_noise,
    child_probs,
    draws_children,
    keep_child_probs,
)
from compilespec.passes.splice.insert_paged_attention import Branches
from compilespec.passes.splice.places import Places, place_rows, placed_by
from compilespec.passes.splice.sampling import head_width, wide_dtype
from compilespec.program import Traced, TreeShape
from compilespec.tracing.capture import output_widths

# The logits [B * F, Vd] of what follows nodes, and their target ids if the drafter has a vocabulary
# apart.
Logits = tuple[Tensor, Tensor | None]
Follow = Callable[[int, Chosen | None], Logits]


class Growth(NamedTuple):
    """How a drafter goes on from its last committed row.

    first: [B], the position of the nodes of depth 1 in the drafter.  drawn: [B], the position that
    drafts of depth 1 are drawn for.  advance: the drafter's pass over the nodes of a depth; gives
    what its head takes, [B, F, D].
    """

    first: Tensor
    drawn: Tensor
    advance: Callable[[TreeNodes], Tensor]


def grow_tree(step: Splice, head: Tensor, argument: str, growth: Growth) -> int:
    """`grow_by_depth` by a drafter that runs the nodes of each depth.

    Args:
        head: what "propose" takes, of the last committed row, [B, 1, D]; argument: by which name.
    Returns: passes of the drafter over depths.
    """
    num_keys = 0
    branches: Branches | None = None

    def follow(depth: int, nodes: Chosen | None) -> Logits:
        nonlocal head, num_keys, branches
        if nodes is not None:
            num_keys += nodes.num
            places = _places(step, growth.first, depth - 2, nodes.num, num_keys)
            branches = Branches(path=nodes.path, earlier=branches.earlier if branches else {})
            head = growth.advance(TreeNodes(nodes.ids, nodes.parent, places, branches))
        _, logits, *ids = step.fragment("propose", **{argument: head.flatten(0, 1)})
        return logits, ids[0] if ids else None

    return grow_by_depth(step, growth.drawn, follow)


def grow_by_depth(step: Splice, drawn: Tensor, follow: Follow) -> int:
    """Make the roles `drafts`, [B, num_nodes], and `parents`, [B, num_nodes + 1].

    Args:
        drawn: [B], the position that drafts of depth 1 are drawn for.
        follow: the logits of a depth's drafts after each node that was chosen before, F of them;
            after the last committed row, if None was.
    Returns: depths after the first.
    """
    shape = step.config.tree
    assert shape is not None, "checked by the caller"
    grower: Grower = StaticTree(shape, step.ctx) if shape.choices else DynamicTree(shape)
    nodes: Chosen | None = None
    distributions: list[Tensor] = []
    for depth in range(1, shape.depth + 1):
        logits, ids = follow(depth, nodes)
        num_rows = 1 if nodes is None else nodes.num
        scores = _scores(step, logits, ids, drawn, num_rows, depth)
        if draws_children(step.ctx):
            distributions.append(child_probs(step, logits, ids, num_rows))
        nodes = grower.grow(step, scores, ids, is_last=depth == shape.depth)
    if distributions:
        keep_child_probs(step, distributions)
    step.roles.drafts, step.roles.parents = grower.finish(step)
    return shape.depth - 1


def parents_hidden(nodes: TreeNodes, hidden: Tensor, width: int) -> Tensor:
    """Of the depth before, the hidden states [B, F, D] that nodes follow."""
    return hidden.gather(1, nodes.parent.unsqueeze(2).expand(-1, -1, width))


def check_drafter(propose: Traced, shape: TreeShape, name: str, num_kept: int | None) -> None:
    """Refuse a tree that a drafter, of whose head `num_kept` rows are left, cannot grow.

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


def _scores(
    step: Splice, logits: Tensor, ids: Tensor | None, drawn: Tensor, num_rows: int, depth: int
) -> Tensor:
    """The scores [B, F, Vd] by which what follows each row is chosen."""
    noise = child_noise(step, drawn + (depth - 1), ids, head_width(step.ctx), depth)
    scores = node_scores(logits, *noise, num_rows=num_rows, dtype=wide_dtype(step.ctx))
    return scores if ids is None else torch.where(ids >= 0, scores, -math.inf)


def node_scores(
    logits_NV: Tensor,
    temperature_B: Tensor | None = None,
    noise_BV: Tensor | None = None,
    *,
    num_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """[B, F, V]: the logits, of sampled requests at their temperature, with the noise by which
    their drafts are drawn, if they are.
    """
    scores_BFV = logits_NV.unflatten(0, (-1, num_rows)).to(dtype)
    if temperature_B is not None:
        scores_BFV = scores_BFV / temperature_B.view(-1, 1, 1).to(dtype)
    return scores_BFV if noise_BV is None else scores_BFV + noise_BV.unsqueeze(1).to(dtype)


def _places(step: Splice, first: Tensor, ahead: int, num_rows: int, num_keys: int) -> Places:
    """Those of nodes whose depth is `ahead` below the first."""
    sizes = {"ahead": ahead, "num_rows": num_rows, "num_keys": num_keys}
    return placed_by(step, depth_places, first, **sizes)


def depth_places(
    first_B: Tensor,
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    ahead: int,
    num_rows: int,
    num_keys: int,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of the keys of a depth's nodes, [B, J]: -1; row and position of the nodes, [B, F]."""
    row_B = torch.where(live_B, index_B, -1).to(torch.int32)
    wanted_BF = (first_B + ahead).unsqueeze(1) + torch.zeros_like(arange_like(first_B, num_rows))
    position, row, _ = place_rows(
        wanted_BF,
        row_B,
        index_B,
        live_B,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    slot = torch.full_like(first_B.unsqueeze(1).expand(-1, num_keys), -1, dtype=torch.int32)
    return slot, row, position
