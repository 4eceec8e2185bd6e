"""Rejection along a tree: the children of a node are tried one after the other.

Where children are drawn without replacement, each is judged by the ratio test, against what the
refusals before it left of both distributions.  Where they are the drafter's best, a token is drawn
from the target's distribution, and the way goes on with the child that it is, if any: what the test
does with drafts that are certain.
Source: Jeon et al. 2024 (recursive rejection sampling without replacement); Miao et al. 2024
(SpecInfer, section 4.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops.sample import layout
from compilespec.passes.splice.acceptance import strict
from compilespec.passes.splice.acceptance.base import Judged
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.drawn_trees import draws_children, inner_rows, read_child_probs
from compilespec.passes.splice.sampling import sampling_state, target_probs
from compilespec.passes.splice.trees import take_path
from compilespec.program import PAD


def decode_tree(step: Splice, ids: Tensor) -> Judged:
    if not draws_children(step.ctx):
        return strict.decode_tree(step, ids)
    roles, tree, ops = step.roles, step.config.tree, torch.ops.compilespec
    assert tree is not None
    probs, whole = target_probs(step), sampling_state(step).whole
    inner = inner_rows(tree)
    of_row = [inner.index(row) if row in inner else 0 for row in range(tree.num_nodes + 1)]
    drawn, stream = step.call(trial_places, roles.start, roles.depth)
    uniform = ops.uniform_noise.default(roles.row_index, drawn, stream, whole)
    leaf, weights = try_children(
        ids, probs, read_child_probs(step), uniform, roles.depth, roles.path, of_row=tuple(of_row)
    )
    last, streams = last_place(roles.start, roles.depth, leaf)
    token = ops.draw_weighted.default(weights, roles.row_index, last, streams, whole)
    return emit_path(
        ids, roles.depth, roles.path, leaf, token, max_depth=step.config.num_draft_tokens
    )


def trial_places(
    start_B: Tensor, depth_BS: Tensor, *, num_verify_tokens: int
) -> tuple[Tensor, Tensor]:
    """Position and stream word of each row's uniform number, int32 [B, S]."""
    drawn_BS = start_B.unsqueeze(1) + depth_BS
    row_S = arange_like(start_B, num_verify_tokens)
    stream_BS = (row_S * layout.STEP + layout.STREAM_ACCEPT).expand_as(drawn_BS)
    return drawn_BS, stream_BS


def try_children(
    ids_BS: Tensor,
    probs_BSV: Tensor,
    child_probs_BIV: Tensor,
    uniform_BS: Tensor,
    depth_BS: Tensor,
    path_BSP: Tensor,
    *,
    of_row: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Follow accepted children from the root on, as far as there are any.

    Args:
        ids_BS: the tokens of the rows, PAD for what must not be judged; child_probs_BIV: what the
            children of the inner rows were drawn from, 0 where they were not; of_row: which of
            these belongs to each row.
    Returns:
        leaf_B: int64, the last accepted row; weights_BV: of the token after it.
    """
    parent_BS = path_BSP.gather(2, (depth_BS - 1).clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    at_B = torch.zeros_like(ids_BS[:, 0]).long()
    target_BV, draft_BV = probs_BSV[:, 0], child_probs_BIV[:, of_row[0]]
    own_BV = target_BV
    for row in range(1, len(of_row)):
        token_B1 = ids_BS[:, row : row + 1]
        place_B1 = token_B1.clamp(min=0).long()
        is_tried_B1 = (parent_BS[:, row : row + 1] == at_B.unsqueeze(1)) & (token_B1 >= 0)
        ratio_B1 = uniform_BS[:, row : row + 1] * draft_BV.gather(1, place_B1)
        is_kept_B1 = is_tried_B1 & (ratio_B1 < target_BV.gather(1, place_B1))
        left_BV = _scaled((target_BV - draft_BV).clamp(min=0))
        rest_BV = _scaled(draft_BV.scatter(1, place_B1, 0))
        own_BV = torch.where(is_kept_B1, probs_BSV[:, row], own_BV)
        target_BV = torch.where(is_tried_B1, left_BV, target_BV)
        target_BV = torch.where(is_kept_B1, own_BV, target_BV)
        draft_BV = torch.where(is_tried_B1, rest_BV, draft_BV)
        draft_BV = torch.where(is_kept_B1, child_probs_BIV[:, of_row[row]], draft_BV)
        at_B = torch.maximum(at_B, is_kept_B1.squeeze(1).long() * row)  # rows come in order
    has_weight_B1 = (target_BV > 0).any(-1, keepdim=True)
    return at_B, torch.where(has_weight_B1, target_BV, own_BV)


def _scaled(weights_BV: Tensor) -> Tensor:
    """Weights that sum to one; all 0 stay so."""
    total_B1 = weights_BV.sum(-1, keepdim=True)
    return weights_BV / torch.where(total_B1 > 0, total_B1, 1)


def last_place(start_B: Tensor, depth_BS: Tensor, leaf_B: Tensor) -> tuple[Tensor, Tensor]:
    """Position and stream word of the token after the accepted ones, int32 [B]."""
    step_B = depth_BS.gather(1, leaf_B.unsqueeze(1)).squeeze(1) + 1
    return start_B + step_B, (step_B * layout.STEP + layout.STREAM_RECOVER).to(torch.int32)


def emit_path(
    ids_BS: Tensor,
    depth_BS: Tensor,
    path_BSP: Tensor,
    leaf_B: Tensor,
    token_B: Tensor,
    *,
    max_depth: int,
) -> Judged:
    """The drafts on the way to `leaf` and the token after them; later entries of `target` are that
    token.
    """
    taken_BP = take_path(path_BSP, leaf_B.unsqueeze(1), sizes=(max_depth + 1,)).squeeze(1)
    count_B = depth_BS.gather(1, leaf_B.unsqueeze(1)).squeeze(1) + 1
    following_BP = torch.cat([taken_BP[:, 1:], torch.full_like(taken_BP[:, :1], -1)], 1)
    drafts_BP = ids_BS.gather(1, following_BP.clamp(min=0).long())
    target_BP = torch.where(following_BP >= 0, drafts_BP, token_B.unsqueeze(1))
    is_emitted_BP = arange_like(ids_BS, max_depth + 1) < count_B.unsqueeze(1)
    taken = taken_BP.clamp(min=0)
    return Judged(target_BP, torch.where(is_emitted_BP, target_BP, PAD), count_B, taken)
