"""Strict: a draft is accepted if it is the target's own choice, greedy or drawn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compilespec.passes.splice.acceptance.base import Judged, Rule
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.sampling import sample_target
from compilespec.passes.splice.trees import longest_accepted
from compilespec.program import PAD


def decode(step: Splice, ids: Tensor) -> Judged:
    target = sample_target(step)
    return Judged(target, *step.call(accept_matching, ids, target))


def decode_tree(step: Splice, ids: Tensor) -> Judged:
    target, roles, depth = sample_target(step), step.roles, step.config.num_draft_tokens
    taken, tokens, emitted, count = longest_accepted(
        ids, target, roles.depth, roles.path, max_depth=depth
    )
    return Judged(tokens, emitted, count, taken)


def prefill(step: Splice) -> Judged:
    target = sample_target(step)
    return Judged(target, *first_token(target, step.roles.live))


def accept_matching(
    ids_BS: Tensor, target_BS: Tensor, *, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """Keep the longest matching prefix of each draft and add the bonus token.

    This is strict acceptance if the target's tokens are argmaxes, and coupled acceptance, as exact,
    if they are drawn.

    Args:
        ids_BS: int32, the last emitted token and the K drafts; target_BS: int32, token i judges
        draft i.
    Returns:
        emitted_BS (int32, PAD after the bonus), num_emitted_B (int32, accepted drafts + 1).
    Source: requirements I11, M9.  Worked example: drafts 5 6 7, target 5 9 7 8 gives 5 9.
    """
    is_kept_BK = ids_BS[:, 1:] == target_BS[:, :num_draft_tokens]
    is_kept_BS = nn.functional.pad(is_kept_BK, (0, 1))  # behind the last draft there is none
    place_S = arange_like(target_BS, num_draft_tokens + 1)
    first_B1 = torch.where(is_kept_BS, num_draft_tokens, place_S).amin(1, keepdim=True)  # refused
    emitted_BS = torch.where(place_S <= first_B1, target_BS, PAD)
    count_B = first_B1.squeeze(1) + 1
    return emitted_BS, count_B


def first_token(target_R1: Tensor, live_R: Tensor) -> tuple[Tensor, Tensor]:
    """Prefill: one token per finished prompt, PAD for the others."""
    emitted_R1 = torch.where(live_R.unsqueeze(1), target_R1, PAD)
    return emitted_R1, live_R.to(torch.int32)


RULE = Rule(lossless=True, decode=decode, prefill=prefill, decode_tree=decode_tree)
