"""What a step says of its drafts beside its tokens: how many there are, and how sure they are.

In programs of several K the host chooses the next K by it.  It comes in the output that holds the
count of tokens, so that nothing more is copied: see `read_outcome`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from compilespec.passes.context import PassContext
from compilespec.passes.graph import (
    emit,
    find_role,
    get_outputs,
    has_role,
    output_node,
    set_outputs,
    splice,
)

NUM_MODEL_LEVELS = 8  # levels 1 to 8: eighths of a draft's probability in the drafter's eyes
MATCHES = (1, 2, 3, 4, 6, 9, 13)  # levels 9 to 15: lengths of a match, from these on
FIRST_MATCH = 1 + NUM_MODEL_LEVELS
NUM_LEVELS = 1 + NUM_MODEL_LEVELS + len(MATCHES)  # level 0: nothing is known of the drafts
NUM_BITS = 8  # of a count


class Evidence(NamedTuple):
    """What is known of the drafts that a step left in a state row."""

    num_drafts: int  # those before the first PAD
    level: int  # how sure they are: below NUM_LEVELS; only likes compare
    goes_on: bool = False  # whether the first draft that the step did not judge was right, too


def read_outcome(outcome: int) -> tuple[int, Evidence]:
    """The number of tokens of a row, and the evidence, of one entry of `outcome_B`."""
    rest, num_emitted = divmod(outcome, 1 << NUM_BITS)
    rest, num_drafts = divmod(rest, 1 << NUM_BITS)
    goes_on, level = divmod(rest, 1 << NUM_BITS)
    return num_emitted, Evidence(num_drafts, level, bool(goes_on))


def without_level(outcome_B: torch.Tensor) -> torch.Tensor:
    """The same, its drafts as sure as if nothing were known of them."""
    return outcome_B & ~((1 << NUM_BITS) - 1 << 2 * NUM_BITS)


def note_sureness(gm: fx.GraphModule, ctx: PassContext, logits: fx.Node, number: int) -> None:
    """Make the role `sure.<number>`, [B]: the log-probability of the likeliest token.  Where a step
    never writes its logits, they are not written for this; a drafter with a head for it says it
    itself.
    """
    if _reads_sureness(ctx) and "sure" not in ctx.draft and not ctx.greedy_only:
        node = emit(gm, best_logprob, logits, before=output_node(gm))
        node.meta["role"] = f"sure.{number}"


def note_confidence(
    gm: fx.GraphModule, ctx: PassContext, row: fx.Node, token: fx.Node, number: int, *,
    place: int | None = None,
) -> None:  # fmt: skip
    """The same of a drafter with a call "sure", for the draft of `row`, [B, D], after `token`; with
    `place`, of that row of several, [B, N, D].
    """
    if _reads_sureness(ctx) and "sure" in ctx.draft:
        if place is not None:
            row = emit(gm, lambda x_BND: x_BND[:, place], row, before=output_node(gm))
        given = {"head_input": row, "token": token}
        (logit,) = splice(gm, ctx, ctx.draft["sure"], given)
        node = emit(gm, accepted_logprob, logit, before=output_node(gm))
        node.meta["role"] = f"sure.{number}"


def _reads_sureness(ctx: PassContext) -> bool:
    return ctx.tells_evidence or (ctx.capabilities.combines and not ctx.read_only)


def accepted_logprob(logit_B: Any) -> Any:
    return functional.logsigmoid(logit_B.float())


def best_logprob(logits_BV: Any) -> Any:
    wide_BV = logits_BV.float()
    return torch.amax(wide_BV, -1) - torch.logsumexp(wide_BV, -1)


def note_evidence(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Make the role `evidence`, int32 [B], of the roles `drafts` and `level`."""
    if ctx.tells_evidence:
        levels = [find_role(gm, "level")] if has_role(gm, "level") else []
        node = emit(
            gm, drafts_and_level, find_role(gm, "drafts"), *levels, before=output_node(gm)
        )  # fmt: skip
        node.meta["role"] = "evidence"


def note_level(gm: fx.GraphModule) -> None:
    """Make the role `level`, int32 [B], of a model's drafts, if they have probabilities."""
    sure = [node for node in gm.graph.nodes if str(node.meta.get("role")).startswith("sure.")]
    if sure:
        node = emit(gm, level_of_logprobs, *sure, before=output_node(gm))
        node.meta["role"] = "level"


def level_of_logprobs(*logprobs_B: Any) -> Any:
    """By the mean: the cumulative probability of the drafts, as if all were as likely."""
    mean_B = (sum(logprobs_B[1:], logprobs_B[0]) / len(logprobs_B)).exp() * NUM_MODEL_LEVELS
    reached = ((mean_B >= step).to(torch.int32) for step in range(1, NUM_MODEL_LEVELS))
    return sum(reached) + 1


def level_of_matches(matched_B: Any) -> Any:
    """By the length of a match; 0 for none."""
    count_B = sum((matched_B >= least).to(torch.int32) for least in MATCHES)
    return torch.where(count_B > 0, count_B + NUM_MODEL_LEVELS, 0).to(torch.int32)


def drafts_and_level(drafts_BK: Any, level_B: Any = 0) -> Any:
    num_drafts_B = (drafts_BK >= 0).to(torch.int32).cumprod(1).sum(1).to(torch.int32)
    return num_drafts_B + level_B * (1 << NUM_BITS)


def report_evidence(gm: fx.GraphModule, ctx: PassContext) -> int:
    """The output `num_emitted_B` becomes `outcome_B`, int32: see `read_outcome`.

    A step of a smaller K says besides whether the first draft that it did not judge is the token
    that it chose in its place.  Numerics: exact.  Torch IR.
    """
    outputs, end = get_outputs(gm), output_node(gm)
    evidence, emitted = find_role(gm, "evidence"), find_role(gm, "num_emitted")
    config = ctx.config
    goes_on: tuple[fx.Node, ...] = ()
    if ctx.phase == "decode" and config.num_draft_tokens < config.num_row_tokens - 1:
        goes_on = (
            emit(
                gm, follows, find_role(gm, "tokens_RS"), find_role(gm, "row_index"),
                find_role(gm, "target"), emitted, before=end, num_judged=config.num_draft_tokens,
            ),
        )  # fmt: skip
    outcome = emit(gm, packed, emitted, evidence, *goes_on, before=end)
    del outputs["num_emitted_B"]
    set_outputs(gm, {"emitted_BS": outputs.pop("emitted_BS"), "outcome_B": outcome, **outputs})
    return 1


def follows(
    tokens_RS: Any, index_B: Any, target_BS: Any, num_emitted_B: Any, *, num_judged: int
) -> Any:
    """Whether all that were judged were right, and the next draft is the target's last token."""
    next_B = tokens_RS[index_B][:, num_judged + 1]
    return (num_emitted_B == num_judged + 1) & (target_BS[:, num_judged] == next_B)


def packed(num_emitted_B: Any, evidence_B: Any, goes_on_B: Any = None) -> Any:
    outcome_B = num_emitted_B + evidence_B * (1 << NUM_BITS)
    if goes_on_B is not None:
        outcome_B = outcome_B + goes_on_B.to(torch.int32) * (1 << 3 * NUM_BITS)
    return outcome_B.to(torch.int32)
