"""Dynamic trees: they grow where the drafter is sure."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.tree_parts import Chosen
from compilespec.program import PAD, TreeShape


class DynamicTree:
    """The most probable paths.  Source: Li et al. 2024 (EAGLE-2), section 4."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape, self._depth = shape, 0
        self._scores: list[Tensor] = []  # of all that was drafted, by depth: [B, ..]
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []  # by their place among all that was drafted; -1: the root
        self._last: tuple[Tensor, ...] = ()  # of the nodes that were run: scores, places, paths

    def grow(
        self, step: Splice, scores: Tensor, ids: Tensor | None, *, is_last: bool
    ) -> Chosen | None:
        width = self._shape.top_k
        summed, tokens, parents = continuations(scores, *self._last[:2], width=width, ids=ids)
        self._scores.append(summed)
        self._tokens.append(tokens)
        self._parents.append(parents)
        if is_last:
            return None
        drafted = 0 if self._depth == 0 else width + (self._depth - 1) * width**2
        chosen, chosen_ids, parent, place, path = most_probable(
            summed,
            tokens,
            *self._last[2:],
            width=width,
            num_before=drafted,
            num_keys=self._depth * width,
        )
        self._last = (chosen, place, path)
        self._depth += 1
        return Chosen(chosen_ids, parent, path, width)

    def finish(self, step: Splice) -> tuple[Tensor, Tensor]:
        scores, tokens, parents = (
            torch.cat(parts, 1) for parts in (self._scores, self._tokens, self._parents)
        )
        return best_nodes(scores, tokens, parents, num_nodes=self._shape.num_nodes)


def continuations(
    scores_BFV: Tensor,
    before_BF: Tensor | None = None,
    place_BF: Tensor | None = None,
    *,
    width: int,
    ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
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
    scores_BN: Tensor,
    tokens_BN: Tensor,
    path_BFd: Tensor | None = None,
    *,
    width: int,
    num_before: int,
    num_keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    scores_BC: Tensor, tokens_BC: Tensor, parents_BC: Tensor, *, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """The drafts [B, N] whose paths are the most probable, in the order in which they were drafted,
    and the parents [B, N + 1] of the rows.

    Of equal ones the first drafted is better, so that a node never goes without its parent.  Ranks
    are counted, not sorted for: a sort of these few is a separate kernel, or several.
    """
    place_C = arange_like(scores_BC, scores_BC.shape[1])
    is_earlier_CC = place_C < place_C.unsqueeze(1)
    one_BC1, other_B1C = scores_BC.unsqueeze(2), scores_BC.unsqueeze(1)
    is_better_BCC = (other_B1C > one_BC1) | ((other_B1C == one_BC1) & is_earlier_CC)
    is_best_BC = is_better_BCC.sum(-1) < num_nodes
    rank_BC = (is_best_BC.unsqueeze(1) & is_earlier_CC).sum(-1)  # among the best, as drafted
    row_N1 = arange_like(scores_BC, num_nodes).unsqueeze(1)
    is_chosen_BNC = is_best_BC.unsqueeze(1) & (rank_BC.unsqueeze(1) == row_N1)
    index_BN = torch.where(is_chosen_BNC, place_C, 0).amax(-1).long()
    parent_BN = parents_BC.gather(1, index_BN).long()
    is_before_BNN = index_BN.unsqueeze(1) < parent_BN.unsqueeze(2)
    row_BN = torch.where(parent_BN < 0, 0, is_before_BNN.sum(-1) + 1).to(torch.int32)
    return tokens_BC.gather(1, index_BN), torch.cat([torch.zeros_like(row_BN[:, :1]), row_BN], 1)
