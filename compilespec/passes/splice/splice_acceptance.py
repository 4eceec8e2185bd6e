"""Judges the drafts inside the step, without the host: longest accepted prefix and bonus token."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.acceptance.registry import RULES, Judged, Rule
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.read_state import first_columns
from compilespec.passes.splice.sampling import note_logprobs, sampling_state
from compilespec.passes.splice.tree_penalties import keep_context
from compilespec.passes.splice.trees import depth_of_rows, verifies_tree
from compilespec.program import PAD


def splice_acceptance(step: Splice) -> int:
    """Logits -> target tokens -> `emitted_BS`, `num_emitted_B` (decode) or the first token
    (prefill), by the rule of the program.

    Roles made: `target` ([B, S], or [R, 1] in prefill), `emitted` and `num_emitted` ([B]).
    Numerics: exact.  Torch IR.
    """
    logits, rule = step.roles.logits, RULES[step.ctx.acceptance.rule]
    judged = _judge(step, rule) if step.is_decode else rule.prefill(step)
    if judged.taken is not None and not step.ctx.greedy_only:
        keep_context(step, sampling_state(step), judged.taken)
    if rule.after is not None:
        rule.after(step, judged)
    for role, value in judged._asdict().items():
        if value is not None:
            step.name(role, value)
    note_logprobs(step, judged.target)
    spoilt = spoilt_rows(logits if step.is_decode else logits.squeeze(0).unsqueeze(1))
    if judged.taken is not None:
        spoilt = spoilt.gather(1, judged.taken.long())
    emitted = blank_spoilt(judged.emitted, spoilt)
    step.set_outputs({"emitted_BS": emitted, "num_emitted_B": judged.num_emitted})
    return 1


def _judge(step: Splice, rule: Rule) -> Judged:
    """What the rule says of the step's drafts."""
    ctx, roles = step.ctx, step.roles
    ids = roles.ids
    if ctx.may_omit_drafts:  # PAD, which `ids` clamped to 0
        ids = step.call(drafted_tokens, roles.tokens_RS, roles.row_index)
    if ctx.config.num_draft_tokens:
        ids = _withhold(step, ids)
    judge = rule.decode_tree if verifies_tree(ctx) else rule.decode
    assert judge is not None, "checked when the program was planned"
    judged = judge(step, ids)
    return _force(step, judged) if ctx.acceptance.force_num_accepted else judged


def spoilt_rows(logits_BSV: Tensor) -> Tensor:
    """Which rows hold NaN.  argmax treats NaN as the largest value, so that one element per row
    suffices.
    """
    best_BS1 = logits_BSV.argmax(-1).unsqueeze(-1)
    return logits_BSV.gather(-1, best_BS1).squeeze(-1).isnan()


def blank_spoilt(emitted_BS: Tensor, is_nan_BS: Tensor) -> Tensor:
    """Replace all tokens of a request by PAD if one of them was judged by logits with NaN.

    The host ends such a request; no other output shows the NaN.
    """
    is_spoilt_B1 = (is_nan_BS & (emitted_BS >= 0)).any(1, keepdim=True)
    return torch.where(is_spoilt_B1, PAD, emitted_BS)


def drafted_tokens(
    tokens_RS: Tensor, index_B: Tensor, *, num_verify_tokens: int, num_row_tokens: int
) -> Tensor:
    """The last emitted token and the drafts as stored in the rows, including PAD: [B, S]."""
    return first_columns(tokens_RS[index_B], num_verify_tokens, num_row_tokens)


def _withhold(step: Splice, ids: Tensor) -> Tensor:
    """Replace the drafts that must not be judged, a request's last `withheld_R`, by PAD.

    This gives each request its own K, down to 0, in the same graph.
    """
    withheld = step.state("withheld_R", (), torch.int32, by_host=True)
    index, depth = step.roles.row_index, depth_of_rows(step)
    return step.call(withhold_drafts, ids, withheld, index, depth)


def withhold_drafts(
    ids_BS: Tensor,
    withheld_R: Tensor,
    index_B: Tensor,
    depth_BS: Tensor | None = None,
    *,
    num_verify_tokens: int,
    num_row_tokens: int,
) -> Tensor:
    """ids_BS with PAD after the columns that the request keeps, or below that depth of a tree;
    column 0 is the last emitted token, and the row holds the drafts of the largest K.
    """
    last_B1 = (num_row_tokens - 1 - withheld_R[index_B]).unsqueeze(1)
    place = arange_like(ids_BS, num_verify_tokens) if depth_BS is None else depth_BS
    return torch.where(place <= last_B1, ids_BS, PAD)


def _force(step: Splice, judged: Judged) -> Judged:
    """Put the forced count into every live row; `target` is unchanged, so its tokens after a wrong
    draft follow from that draft.  Source: requirement I1.
    """
    wanted = step.ctx.acceptance.force_num_accepted + 1
    emitted, count = step.call(
        force_count,
        judged.target,
        judged.num_emitted,
        step.roles.live,
        num_emitted=min(wanted, step.config.num_verify_tokens),
    )
    return Judged(judged.target, emitted, count)


def force_count(
    target_BS: Tensor,
    count_B: Tensor,
    live_B: Tensor,
    *,
    num_verify_tokens: int,
    num_emitted: int,
) -> tuple[Tensor, Tensor]:
    """(emitted_BS, num_emitted_B) with the forced count in live rows."""
    forced_B = torch.where(live_B, num_emitted, count_B).to(torch.int32)
    step_S = arange_like(target_BS, num_verify_tokens)
    return torch.where(step_S < forced_B.unsqueeze(1), target_BS, PAD), forced_B
