"""Chooses tokens on the device: the state rows of sampling, and the operators that read them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import compilespec.ops.sample.draft_noise
import compilespec.ops.sample.probabilities  # noqa: F401  (registers the operators)
from compilespec.ops.sample.layout import (
    FLAGS,
    GUIDE,
    MAX_LOGPROBS,
    MIN_TEMPERATURE,
    NUM_FLOATS,
    NUM_INTS,
    STEP,
    STREAM_DRAFT,
    STREAM_DRAW,
    TEMPERATURE,
)
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like, node_of
from compilespec.passes.splice.evidence import note_sureness
from compilespec.passes.splice.tree_penalties import penalise_paths
from compilespec.passes.splice.trees import depth_of_rows, taken_rows, verifies_tree
from compilespec.tracing.capture import output_widths


class SamplingState(NamedTuple):
    """The state rows of sampling; the host writes the first three."""

    real: Tensor  # float32 [R, NUM_FLOATS]: temperature and other parameters
    whole: Tensor  # int32 [R, NUM_INTS]: flags, seeds and other parameters
    bias: Tensor  # float32 [R, V]
    context: Tensor  # int32 [R, L]: the request's tokens by position


def sampling_state(step: Splice) -> SamplingState:
    """The state rows of sampling, declared on first use."""
    return SamplingState(
        step.state("sampling_RF", (NUM_FLOATS,), torch.float32, by_host=True),
        step.state("sampling_RI", (NUM_INTS,), torch.int32, by_host=True),
        step.state("bias_RV", (step.config.vocab_size,), torch.float32, by_host=True),
        step.state("context_RL", (step.config.max_seq_len,), torch.int32),
    )


def guide_masks(step: Splice) -> Tensor:
    """Which ids a guided request may choose at each row of its window, one bit per id."""
    shape = (step.config.num_row_tokens, -(-step.config.vocab_size // 32))
    return step.state("mask_RSW", shape, torch.int32, by_host=True)


def wide_dtype(ctx: PassContext) -> torch.dtype:
    """The dtype in which probabilities are computed."""
    return torch.promote_types(ctx.config.dtype, torch.float32)


# --- the target's tokens ---


def sample_target(step: Splice) -> Tensor:
    """The target's token at every row of `logits`: [B, S], or [R, 1] in prefill, int32.

    The argmax is a separate node, which greedy rows use; the operator overrides the other rows. In
    decode it is given the tokens that were fed, for penalties; the host writes the prompt's.
    """
    if step.ctx.greedy_only:
        return _greedy(step)
    token: Tensor = torch.ops.compilespec.sample.default(*_target_rows(step))
    return token


def _greedy(step: Splice) -> Tensor:
    """The argmax of `logits`; nothing else reads them."""
    if step.is_decode:
        return step.roles.logits.argmax(-1).to(torch.int32)
    _, token, _ = prefill_choice(step.roles.logits, step.roles.start)
    return token


def target_probs(step: Splice) -> Tensor:
    """The distributions that `sample_target` draws from: [B, S, V], `wide_dtype`."""
    probs: Tensor = torch.ops.compilespec.filtered_probs.default(*_target_rows(step))
    return probs


def _target_rows(step: Splice) -> tuple[Tensor | None, ...]:
    """The arguments of the operators on the target's rows."""
    roles = step.roles
    logits, state = roles.logits, tuple(sampling_state(step))
    ids: Tensor | None = None
    if verifies_tree(step.ctx):
        logits, state = penalise_paths(step, logits, state)
    if step.is_decode:
        ids, greedy = roles.ids, logits.argmax(-1).to(torch.int32)
        drawn = step.call(drawn_positions, roles.start, depth_of_rows(step))
    else:
        logits, greedy, drawn = prefill_choice(logits, roles.start)
    return (logits, greedy, ids, roles.row_index, drawn, *state, guide_masks(step))


def drawn_positions(
    start_B: Tensor, depth_BS: Tensor | None = None, *, num_verify_tokens: int
) -> Tensor:
    """Row s holds the token at start + s, of a tree at start + its depth, and draws the next one,
    int32 [B, S].
    """
    place = arange_like(start_B, num_verify_tokens) if depth_BS is None else depth_BS
    return start_B.unsqueeze(1) + (place + 1)


def prefill_choice(logits_1RV: Tensor, start_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, 1, V], their argmax, and the position after each prompt, int32 [R, 1]."""
    logits_R1V = logits_1RV.squeeze(0).unsqueeze(1)
    return logits_R1V, logits_R1V.argmax(-1).to(torch.int32), start_R.unsqueeze(1)


def allowed_drafts(step: Splice, draft: Tensor) -> Tensor:
    """Which of the drafts [B, K] the requests' guides allow: bool [B, K]."""
    whole, masks = sampling_state(step).whole, guide_masks(step)
    return step.call(allowed_by_guides, draft, whole, masks, step.roles.row_index)


def allowed_by_guides(
    draft_BK: Tensor,
    sampling_RI: Tensor,
    mask_RSW: Tensor,
    index_B: Tensor,
    *,
    num_draft_tokens: int,
) -> Tensor:
    """True for every draft of a request without a guide."""
    place_BK = draft_BK.clamp(min=0).long()
    words_BKW = mask_RSW[index_B][:, :num_draft_tokens]
    word_BK = words_BKW.gather(2, (place_BK // 32).unsqueeze(-1)).squeeze(-1)
    is_free_B1 = (sampling_RI[index_B][:, FLAGS] & GUIDE == 0).unsqueeze(1)
    return is_free_B1 | (word_BK >> (place_BK % 32) & 1 != 0)


def note_logprobs(step: Splice, target: Tensor) -> None:
    """Write log-probabilities of the step's tokens into state rows, for the host."""
    if step.ctx.greedy_only:
        return
    raw = step.find("raw_logits")
    logits = step.roles.logits if raw is None else raw
    if not step.is_decode:
        logits = logits.squeeze(0).unsqueeze(1)
    if verifies_tree(step.ctx):
        logits = taken_rows(step, logits, step.config.vocab_size)
    whole, tokens = sampling_state(step).whole, step.config.num_row_tokens
    values = step.state("logprob_RSN", (tokens, MAX_LOGPROBS + 1), torch.float32)
    ids = step.state("logprob_id_RSN", (tokens, MAX_LOGPROBS), torch.int32)
    torch.ops.compilespec.note_logprobs.default(
        logits, target, step.roles.row_index, whole, values, ids
    )


# --- drafts ---


class Proposal(NamedTuple):
    """What a captured "propose" gives."""

    token: Tensor  # int32 [B]: the likeliest one, a target id
    logits: Tensor | None = None  # [B, Vd], if the drafter offers them
    ids: Tensor | None = None  # int64 [Vd]: their target ids, if its vocabulary is another one


def draft_token(
    step: Splice, proposal: Proposal, base: Tensor, offset: int, *, number: int | None = None
) -> Tensor:
    """The draft of each request for position base + offset, [B], int32.

    Args:
        number: number of the draft in the step, 1..K; None: `offset`.
    """
    token, logits, ids = proposal
    if logits is not None:
        note_sureness(step, logits, number or offset)
    if step.ctx.greedy_only:
        return token
    if not step.ctx.acceptance.couples_drafts:
        return _own_draft(step, proposal, base, offset, number or offset)
    if logits is None:
        return token
    drawn, state = base + offset, sampling_state(step)
    draft: Tensor = torch.ops.compilespec.draw.default(
        logits, token, ids, step.roles.row_index, drawn, state.real, state.whole
    )
    return draft


def draft_noise(
    step: Splice, drawn: Tensor, ids: Tensor | None, num_ids: int, stream: int = STREAM_DRAW
) -> tuple[Tensor, ...]:
    """The temperature [B] and the noise [B, V] with which the target will draw the token at
    `drawn`, or that of another stream: 1 and 0 for greedy requests; nothing where all are greedy.
    """
    if step.ctx.greedy_only:
        return ()
    index, state = step.roles.row_index, sampling_state(step)
    temperature = drawn_temperature(state.real, index)
    noise = torch.ops.compilespec.draft_noise.default(
        index, drawn, ids, num_ids, state.real, state.whole, stream
    )
    return temperature, noise


def drawn_temperature(sampling_RF: Tensor, index_B: Tensor) -> Tensor:
    """[B]: 1 for greedy requests."""
    temperature_B = sampling_RF[index_B][:, TEMPERATURE]
    return torch.where(temperature_B >= MIN_TEMPERATURE, temperature_B, 1)


# --- drafts drawn with independent noise, and the distributions that they are drawn from ---


def _own_draft(step: Splice, proposal: Proposal, base: Tensor, offset: int, number: int) -> Tensor:
    """Draft `number`, drawn from a distribution over the target's ids, or the token itself if the
    drafter offers no logits.  The distribution is kept if the rule reads it (role
    `draft_probs.<number>`).
    """
    if not gives_draft_probs(step.ctx):
        return proposal.token
    index, state, width = step.roles.row_index, sampling_state(step), step.config.vocab_size
    num_ids = width
    if proposal.logits is not None:
        num_ids = node_of(proposal.logits).meta["example"][0][-1]
    probs = draft_probs(
        proposal,
        state.real,
        index,
        vocab_size=width,
        num_missing=width - num_ids,
        dtype=wide_dtype(step.ctx),
    )
    step.name(f"draft_probs.{number}", probs)
    drawn, stream = draft_place(base, offset=offset, number=number)
    draft: Tensor = torch.ops.compilespec.draw_weighted.default(
        probs, index, drawn, stream, state.whole
    )
    return draft


def gives_draft_probs(ctx: PassContext) -> bool:
    """True where the drafter offers logits with its proposals."""
    calls = (call for name, call in ctx.draft.items() if name.startswith("propose"))
    return any(len(output_widths(call)) > 1 for call in calls)


def head_width(ctx: PassContext) -> int:
    """Ids that the drafter's head knows, of a drafter that offers logits."""
    proposals = (call for name, call in ctx.draft.items() if name.startswith("propose"))
    return output_widths(next(proposals))[1]


def keep_draft_probs(step: Splice) -> None:
    """Write the distributions of the step's drafts into state rows, for the next step's rule."""
    is_read = step.ctx.acceptance.reads_draft_probs and step.config.tree is None
    if not (is_read and gives_draft_probs(step.ctx)):
        return
    numbers = range(1, step.config.num_draft_tokens + 1)
    parts = [step.role(f"draft_probs.{number}") for number in numbers]
    num_missing = step.config.num_row_tokens - 1 - len(parts)
    write_draft_probs(_draft_prob_rows(step), step.roles.row_index, *parts, num_missing=num_missing)


def read_draft_probs(step: Splice, draft: Tensor) -> Tensor:
    """The distributions of the drafts [B, K]: [B, K, V]; 1 at a draft whose own is unknown."""
    if gives_draft_probs(step.ctx):
        rows = _draft_prob_rows(step)
        return rows[step.roles.row_index][:, : step.config.num_draft_tokens]
    return one_hot(draft, vocab_size=step.config.vocab_size, dtype=wide_dtype(step.ctx))


def _draft_prob_rows(step: Splice) -> Tensor:
    shape = (step.config.num_row_tokens - 1, step.config.vocab_size)
    return step.state("draft_prob_RKV", shape, wide_dtype(step.ctx))


def draft_probs(
    proposal: Proposal,
    sampling_RF: Tensor,
    index_B: Tensor,
    *,
    vocab_size: int,
    num_missing: int,
    dtype: torch.dtype,
) -> Tensor:
    """Softmax of the drafter's logits at the request's temperature, over the target's ids [B, V]; 1
    at the token if the request is greedy or there are no logits.  `num_missing`: ids that the
    drafter's head lacks if it has no own vocabulary.
    """
    token_B, logits_BV, ids_V = proposal
    greedy_BV = one_hot(token_B, vocab_size=vocab_size, dtype=dtype)
    if logits_BV is None:
        return greedy_BV
    temperature_B1 = sampling_RF[index_B][:, TEMPERATURE].unsqueeze(1)
    is_drawn_B1 = temperature_B1 >= MIN_TEMPERATURE
    scale_B1 = torch.where(is_drawn_B1, temperature_B1, 1).to(dtype)
    scores_BV = logits_BV.to(dtype) / scale_B1
    if ids_V is not None:
        scores_BV = torch.where(ids_V >= 0, scores_BV, -math.inf)
    probs_BV = scores_BV.softmax(-1)
    if ids_V is not None:
        zeros_BV = torch.zeros_like(greedy_BV)
        probs_BV = zeros_BV.index_add(1, ids_V.clamp(min=0), probs_BV)
    else:
        probs_BV = functional.pad(probs_BV, (0, num_missing))
    return torch.where(is_drawn_B1, probs_BV, greedy_BV)


def one_hot(token: Tensor, *, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """[..., V]: 1 at the token; all 0 if it is PAD."""
    return (token.unsqueeze(-1) == arange_like(token, vocab_size)).to(dtype)


def draft_place(base_B: Tensor, *, offset: int, number: int) -> tuple[Tensor, Tensor]:
    """Position and stream word of a draft, int32 [B]."""
    drawn_B = base_B + offset
    return drawn_B, torch.full_like(drawn_B, STREAM_DRAFT + STEP * number)


def write_draft_probs(
    rows_RKV: Tensor, index_B: Tensor, *probs_BV: Tensor, num_missing: int
) -> Tensor:
    """Append zeros for the drafts that a step of a smaller K does not make."""
    parts = [*probs_BV, *[torch.zeros_like(probs_BV[0])] * num_missing]
    return rows_RKV.index_put_((index_B,), torch.stack(parts, 1))
