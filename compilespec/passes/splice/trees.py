"""Trees of drafts: their topology in state rows, and the way along an accepted path.

A tree is an array of parents by row of the verify step, root first: parents_RS, in which none comes
after its children.  What follows from it is computed in the step: the depth of each row, and its
path, the rows from the root to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.program import PAD, BufferSpec, ProgramConfig


def parent_rows(config: ProgramConfig) -> BufferSpec:
    """The parent of each row of the next verify step, by its index; the root is its own."""
    shape = (config.num_rows, config.num_row_tokens)
    return BufferSpec(name="parents_RS", kind="state", shape=shape, dtype=torch.int32)


def verifies_tree(ctx: PassContext) -> bool:
    """True where the graph judges a tree."""
    return ctx.config.tree is not None and ctx.phase == "decode"


def depth_of_rows(step: Splice) -> Tensor | None:
    """The depth of each row of the tree that the graph judges; None if that is a chain."""
    return step.roles.depth if verifies_tree(step.ctx) else None


def follow_parents(parent_BS: Tensor, *, num_tokens: int, max_depth: int) -> tuple[Tensor, Tensor]:
    """Depths [B, S], 0 at the root, and paths [B, S, max_depth + 1], -1 after their end."""
    up_BS = torch.zeros_like(parent_BS) + arange_like(parent_BS, num_tokens)
    ups = [up_BS]
    for _ in range(max_depth):
        up_BS = parent_BS.gather(1, up_BS.long())
        ups.append(up_BS)
    up_BSP = torch.stack(ups, -1)
    depth_BS = (up_BSP[:, :, :max_depth] != 0).sum(-1).to(torch.int32)
    back_BSP = depth_BS.unsqueeze(-1) - arange_like(parent_BS, max_depth + 1)
    path_BSP = up_BSP.gather(2, back_BSP.clamp(min=0).long())
    return depth_BS, torch.where(back_BSP >= 0, path_BSP, -1)


def longest_accepted(
    ids_BS: Tensor, target_BS: Tensor, depth_BS: Tensor, path_BSP: Tensor, *, max_depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the longest path of which each draft is the target's token at the row before it.

    Args:
        ids_BS: int32, the last emitted token and the drafts by node, PAD where there is none;
            target_BS: int32, the target's token after each row.
    Returns:
        taken_BP: int32, the path's rows, 0 after them; target_BP: the target's tokens there;
        emitted_BP: these with PAD after the bonus; num_emitted_B: int32, accepted drafts + 1.
        P = max_depth + 1.
    Worked example: drafts 5, 7 and, after 5, 9 (rows 1 to 3); target 5 9 0 4 takes rows 0 1 3 and
    gives 5 9 4.
    """
    parent_BS = path_BSP.gather(2, (depth_BS - 1).clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    is_match_BS = (ids_BS == target_BS.gather(1, parent_BS.long())) | (depth_BS == 0)
    wide_BSS = is_match_BS.to(torch.int32).unsqueeze(1) + torch.zeros_like(depth_BS).unsqueeze(-1)
    along_BSP = wide_BSS.gather(2, path_BSP.clamp(min=0).long())
    is_kept_BS = torch.where(path_BSP >= 0, along_BSP, 1).amin(-1)
    leaf_B1 = torch.where(is_kept_BS != 0, depth_BS, -1).argmax(1).unsqueeze(1)
    count_B = depth_BS.gather(1, leaf_B1).squeeze(1) + 1
    taken_BP = take_path(path_BSP, leaf_B1, sizes=(max_depth + 1,)).squeeze(1).clamp(min=0)
    target_BP = target_BS.gather(1, taken_BP.long())
    is_emitted_BP = arange_like(ids_BS, max_depth + 1) < count_B.unsqueeze(1)
    return taken_BP, target_BP, torch.where(is_emitted_BP, target_BP, PAD), count_B


def take_path(x: Tensor, taken_BP: Tensor, *, sizes: Sequence[int]) -> Tensor:
    """Rows `taken_BP` of x, [B, S, *sizes]: [B, P, *sizes]."""
    index = taken_BP.long()
    for _ in sizes:
        index = index.unsqueeze(-1)
    return x.gather(1, index.expand([-1, -1, *sizes]))


def taken_rows(step: Splice, source: Tensor, width: int) -> Tensor:
    """The rows [B, P, D] of `source`, [B, S, D], on the accepted path."""
    return take_path(source, step.roles.taken, sizes=(width,))
