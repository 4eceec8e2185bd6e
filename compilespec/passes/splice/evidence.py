"""What a step says of its drafts beside its tokens: how many there are, and how sure they are.

In programs of several K the host chooses the next K by it.  It comes in the output that holds the
count of tokens, so that nothing more is copied: see `read_outcome`.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice

# Confidences; 0: nothing is known of the drafts.
NUM_MODEL_CONFIDENCES = 8  # 1 to 8: eighths of a draft's probability in the drafter's eyes
MATCHES = (1, 2, 3, 4, 6, 9, 13)  # 9 to 15: lengths of a match, from these on
FIRST_MATCH = 1 + NUM_MODEL_CONFIDENCES
NUM_CONFIDENCES = FIRST_MATCH + len(MATCHES)
NUM_BITS = 8  # of a count


class Evidence(NamedTuple):
    """The facts known of the drafts that a step left in a state row."""

    num_drafts: int  # those before the first PAD
    confidence: int  # how sure they are: below NUM_CONFIDENCES; only likes compare
    goes_on: bool = False  # whether the first draft that the step did not judge was right, too


def read_outcome(outcome: int) -> tuple[int, Evidence]:
    """The number of tokens of a row, and the evidence, of one entry of `outcome_B`."""
    rest, num_emitted = divmod(outcome, 1 << NUM_BITS)
    rest, num_drafts = divmod(rest, 1 << NUM_BITS)
    goes_on, confidence = divmod(rest, 1 << NUM_BITS)
    return num_emitted, Evidence(num_drafts, confidence, bool(goes_on))


def without_confidence(outcome_B: Tensor) -> Tensor:
    """The same, its drafts as sure as if nothing were known of them."""
    return outcome_B & ~((1 << NUM_BITS) - 1 << 2 * NUM_BITS)


def note_sureness(step: Splice, logits: Tensor, number: int) -> None:
    """Make the role `sure.<number>`, [B]: the log-probability of the likeliest token, where a step
    writes its logits and the drafter has no head for it.
    """
    ctx = step.ctx
    if _reads_sureness(ctx) and "sure" not in ctx.draft and not ctx.greedy_only:
        step.name(f"sure.{number}", best_logprob(logits))


def note_own_sureness(
    step: Splice, row: Tensor, token: Tensor, number: int, *, place: int | None = None
) -> None:
    """The same of a drafter's call "sure", for `row`, [B, D] or its `place` in [B, N, D]."""
    if _reads_sureness(step.ctx) and "sure" in step.ctx.draft:
        own = row if place is None else row[:, place]
        (logit,) = step.fragment("sure", head_input=own, token=token)
        step.name(f"sure.{number}", functional.logsigmoid(logit.float()))


def _reads_sureness(ctx: PassContext) -> bool:
    return ctx.tells_evidence or (ctx.capabilities.combines and not ctx.is_replay)


def best_logprob(logits_BV: Tensor) -> Tensor:
    wide_BV = logits_BV.float()
    return torch.amax(wide_BV, -1) - torch.logsumexp(wide_BV, -1)


def note_evidence(step: Splice) -> None:
    """Make the role `evidence`, int32 [B], of the roles `drafts` and `confidence`."""
    if step.ctx.tells_evidence:
        step.roles.evidence = drafts_and_confidence(step.roles.drafts, step.find("confidence"))


def note_confidence(step: Splice) -> None:
    """Make the role `confidence`, int32 [B], of a model's drafts, if they have probabilities."""
    roles = (str(node.meta.get("role")) for node in step.graph.nodes)
    sure = [step.role(role) for role in roles if role.startswith("sure.")]
    if sure:
        step.roles.confidence = confidence_of_logprobs(*sure)


def confidence_of_logprobs(*logprobs_B: Tensor) -> Tensor:
    """By the mean: the cumulative probability of the drafts, as if all were as likely."""
    mean_B = (sum(logprobs_B[1:], logprobs_B[0]) / len(logprobs_B)).exp() * NUM_MODEL_CONFIDENCES
    reached = ((mean_B >= step).to(torch.int32) for step in range(1, NUM_MODEL_CONFIDENCES))
    return cast(Tensor, sum(reached)) + 1


def confidence_of_matches(matched_B: Tensor) -> Tensor:
    """By the length of a match; 0 for none."""
    count_B = cast(Tensor, sum((matched_B >= least).to(torch.int32) for least in MATCHES))
    return torch.where(count_B > 0, count_B + NUM_MODEL_CONFIDENCES, 0).to(torch.int32)


def drafts_and_confidence(drafts_BK: Tensor, confidence_B: Tensor | None) -> Tensor:
    num_drafts_B = (drafts_BK >= 0).to(torch.int32).cumprod(1).sum(1).to(torch.int32)
    confidence: Tensor | int = 0 if confidence_B is None else confidence_B
    return num_drafts_B + confidence * (1 << NUM_BITS)


def report_evidence(step: Splice) -> int:
    """The output `num_emitted_B` becomes `outcome_B`, int32: see `read_outcome`.

    A step of a smaller K says besides whether the first draft that it did not judge is the token
    that it chose in its place.  Numerics: exact.  Torch IR.
    """
    outputs, roles, num_judged = step.outputs(), step.roles, step.config.num_draft_tokens
    goes_on: Tensor | None = None
    if step.is_decode and num_judged < step.config.num_row_tokens - 1:
        goes_on = step.call(
            follows, roles.tokens_RS, roles.row_index, roles.target, roles.num_emitted
        )
    outcome = packed(roles.num_emitted, roles.evidence, goes_on)
    del outputs["num_emitted_B"]
    step.set_outputs({"emitted_BS": outputs.pop("emitted_BS"), "outcome_B": outcome, **outputs})
    return 1


def follows(
    tokens_RS: Tensor, index_B: Tensor, target_BS: Tensor, num_emitted_B: Tensor,
    *, num_draft_tokens: int,
) -> Tensor:  # fmt: skip
    """True where all that were judged were right, and the next draft is the target's last token."""
    next_B = tokens_RS[index_B][:, num_draft_tokens + 1]
    is_whole_B = num_emitted_B == num_draft_tokens + 1
    return is_whole_B & (target_BS[:, num_draft_tokens] == next_B)


def packed(num_emitted_B: Tensor, evidence_B: Tensor, goes_on_B: Tensor | None = None) -> Tensor:
    outcome_B = num_emitted_B + evidence_B * (1 << NUM_BITS)
    if goes_on_B is not None:
        outcome_B = outcome_B + goes_on_B.to(torch.int32) * (1 << 3 * NUM_BITS)
    return outcome_B.to(torch.int32)
