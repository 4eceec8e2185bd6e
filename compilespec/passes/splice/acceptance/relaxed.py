"""Relaxed: while a request thinks, a draft need only be among the target's best tokens.  LOSSY.

Each request has a margin, `relaxed_delta_R`: a draft is accepted if it is the target's choice, or
one of its `topk` best tokens and at most the margin less probable than the best; the token after
the first rejected draft is the target's choice.  The margin is `delta` after BEGIN, and 0 at first
and after END; a token takes effect from the next step on.  Source: requirement M10.

Unlike TensorRT-LLM: a margin of 0 is strict, ties included (H-13); a chunk of a prompt without
markers leaves the margin as it is, and an END in a prompt counts (H-12); among equally probable
tokens the lower id is better; a token that a guide forbids is never accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.acceptance import strict
from compilespec.passes.splice.acceptance.base import Judged, Rule
from compilespec.passes.splice.acceptance.rule import Relaxed
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.sampling import allowed_drafts, sample_target, wide_dtype
from compilespec.program import PAD


def decode(step: Splice, ids: Tensor) -> Judged:
    roles, ctx, choice, draft = step.roles, step.ctx, sample_target(step), ids[:, 1:]
    allowed = None if ctx.greedy_only else allowed_drafts(step, draft)
    read = (draft, roles.logits, choice, _margins(step), roles.row_index, allowed)
    sizes = {"topk": _options(ctx).topk, "dtype": wide_dtype(ctx)}
    return Judged(*step.call(accept_relaxed, *read, **sizes))


def update(step: Splice, judged: Judged) -> None:
    """The margins after this step's tokens."""
    options, roles, margins = _options(step.ctx), step.roles, _margins(step)
    markers = {
        "begin": options.begin_thinking_token_id,
        "end": options.end_thinking_token_id,
        "delta": options.delta,
    }
    if step.is_decode:
        step.call(update_margins, margins, roles.row_index, judged.emitted, **markers)
    else:
        prompt = (roles.ids_T, roles.position_T, roles.row_T, roles.owner_T, roles.last_R)
        step.call(read_prompts, margins, *prompt, judged.emitted, **markers)


def accept_relaxed(
    draft_BK: Tensor,
    logits_BSV: Tensor,
    choice_BS: Tensor,
    margin_R: Tensor,
    index_B: Tensor,
    is_allowed_BK: Tensor | None,
    *,
    num_draft_tokens: int,
    topk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `strict.accept_matching`, but returns (target, emitted, count): `target_BS` holds the
    accepted drafts, then the target's choices.  `is_allowed_BK` is given if requests may have
    guides.
    """
    judge_BKV = logits_BSV[:, :num_draft_tokens]
    margin_B1 = margin_R[index_B].unsqueeze(1)
    place_BK1 = draft_BK.clamp(min=0).long().unsqueeze(-1)
    score_BK1 = judge_BKV.gather(-1, place_BK1)
    is_lower_BKV = arange_like(choice_BS, judge_BKV.size(-1)) < place_BK1
    is_better_BKV = (judge_BKV > score_BK1) | ((judge_BKV == score_BK1) & is_lower_BKV)
    probability_BKV = judge_BKV.to(dtype).softmax(-1)
    needed_BK = probability_BKV.amax(-1) - margin_B1
    is_near_BK = probability_BKV.gather(-1, place_BK1).squeeze(-1) >= needed_BK
    is_near_BK = is_near_BK & (is_better_BKV.sum(-1) < topk) & (draft_BK >= 0) & (margin_B1 > 0)
    if is_allowed_BK is not None:
        is_near_BK = is_near_BK & is_allowed_BK
    is_kept_BK = (draft_BK == choice_BS[:, :num_draft_tokens]) | is_near_BK
    kept_B1 = is_kept_BK.to(torch.int32).cumprod(1).sum(1, keepdim=True).to(torch.int32)
    step_S = arange_like(choice_BS, num_draft_tokens + 1)
    draft_BS = torch.cat([draft_BK, choice_BS[:, num_draft_tokens:]], 1)
    target_BS = torch.where(step_S < kept_B1, draft_BS, choice_BS)
    emitted_BS = torch.where(step_S <= kept_B1, target_BS, PAD)
    return target_BS, emitted_BS, (kept_B1 + 1).squeeze(1)


def update_margins(
    margin_R: Tensor,
    index_B: Tensor,
    emitted_BS: Tensor,
    *,
    num_verify_tokens: int,
    begin: int,
    end: int,
    delta: float,
) -> Tensor:
    """Decode: the newest marker among the emitted tokens decides."""
    newest_B = mark(emitted_BS, arange_like(emitted_BS, num_verify_tokens), begin, end).amax(1)
    return margin_R.index_put_((index_B,), marked(margin_R[index_B], newest_B, delta))


def read_prompts(
    margin_R: Tensor,
    ids_T: Tensor,
    position_T: Tensor,
    row_T: Tensor,
    owner_T: Tensor,
    last_R: Tensor,
    emitted_R1: Tensor,
    *,
    spare_row: int,
    begin: int,
    end: int,
    delta: float,
) -> Tensor:
    """Prefill: the newest marker among a request's tokens of this call, then its first token.

    A request whose first position is in the call starts at 0, regardless of what its row held;
    tokens that a chunk repeats change nothing.
    """
    request_R = arange_like(last_R, last_R.size(0))
    is_mine_RT = (owner_T == request_R.unsqueeze(1)) & (row_T >= 0)
    marks_T = mark(ids_T, arange_like(ids_T, ids_T.size(0)), begin, end)
    newest_R = torch.where(is_mine_RT, marks_T, 0).amax(1)
    is_new_R = (is_mine_RT & (position_T == 0)).any(1)
    last_R = last_R.long()
    row_R = torch.where(owner_T[last_R] == request_R, row_T[last_R], PAD)
    index_R = torch.where(row_R >= 0, row_R, spare_row).long()
    old_R = torch.where(is_new_R, 0.0, margin_R[index_R])
    first_R = mark(emitted_R1, 0, begin, end).squeeze(1)
    new_R = marked(marked(old_R, newest_R, delta), first_R, delta)
    return margin_R.index_put_((index_R,), new_R)


def mark(ids: Tensor, place: Tensor | int, begin: int, end: int) -> Tensor:
    """2 * place + 2 at BEGIN, 2 * place + 1 at END, else 0: the largest is the newest."""
    is_marker = (ids == begin) | (ids == end)
    return torch.where(is_marker, 2 * place + 1 + (ids == begin).to(torch.int32), 0)


def marked(margin: Tensor, newest: Tensor, delta: float) -> Tensor:
    """The margin after the newest marker, float32."""
    return torch.where(newest == 0, margin, torch.where(newest % 2 == 0, delta, 0.0))


def _margins(step: Splice) -> Tensor:
    return step.state("relaxed_delta_R", (), torch.float32)


def _options(ctx: PassContext) -> Relaxed:
    assert ctx.acceptance.relaxed is not None
    return ctx.acceptance.relaxed


RULE = Rule(lossless=False, decode=decode, prefill=strict.prefill, after=update)
