"""Chooses tokens on the device: the state rows of sampling, and the operators that read them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
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
from compilespec.passes.evidence import note_sureness
from compilespec.passes.graph import add_buffer, arange_like, emit, find_role, has_role, output_node
from compilespec.passes.tree_penalties import penalise_paths
from compilespec.passes.trees import taken_rows, verifies_tree
from compilespec.program import BufferSpec
from compilespec.tracing.capture import output_widths


def sample_target(gm: fx.GraphModule, ctx: PassContext, *, before: fx.Node) -> fx.Node:
    """The target's token at every row of `logits`: [B, S], or [R, 1] in prefill, int32.

    The argmax is a separate node, which greedy rows use; the operator overrides the other rows. In
    decode it is given the tokens that were fed, for penalties; the host writes the prompt's.
    """
    if ctx.greedy_only:
        return _greedy(gm, ctx, before=before)
    arguments = _target_rows(gm, ctx, before=before)
    with gm.graph.inserting_before(before):
        return gm.graph.call_function(torch.ops.compilespec.sample.default, arguments)


def _greedy(gm: fx.GraphModule, ctx: PassContext, *, before: fx.Node) -> fx.Node:
    """The argmax of `logits`; nothing else reads them."""
    logits = find_role(gm, "logits")
    if ctx.phase == "decode":
        node: fx.Node = emit(gm, lambda x: x.argmax(-1).to(torch.int32), logits, before=before)
        return node
    _, node, _ = emit(gm, prefill_choice, logits, find_role(gm, "start"), before=before)
    return node


def target_probs(gm: fx.GraphModule, ctx: PassContext, *, before: fx.Node) -> fx.Node:
    """The distributions that `sample_target` draws from: [B, S, V], `wide_dtype`."""
    arguments = _target_rows(gm, ctx, before=before)
    with gm.graph.inserting_before(before):
        return gm.graph.call_function(torch.ops.compilespec.filtered_probs.default, arguments)


def _target_rows(gm: fx.GraphModule, ctx: PassContext, *, before: fx.Node) -> tuple[Any, ...]:
    """The arguments of the operators on the target's rows."""
    logits, index = find_role(gm, "logits"), find_role(gm, "row_index")
    start, state = find_role(gm, "start"), sampling_state(gm, ctx)
    if verifies_tree(ctx):
        logits, state = penalise_paths(gm, logits, state, before=before)
    if ctx.phase == "decode":
        greedy = emit(gm, lambda x_BSV: x_BSV.argmax(-1).to(torch.int32), logits, before=before)
        depth = (find_role(gm, "depth"),) if verifies_tree(ctx) else ()
        drawn = emit(
            gm, drawn_positions, start, *depth, before=before,
            num_tokens=ctx.config.num_verify_tokens,
        )  # fmt: skip
        ids: fx.Node | None = find_role(gm, "ids")
    else:
        logits, greedy, drawn = emit(gm, prefill_choice, logits, start, before=before)
        ids = None
    return (logits, greedy, ids, index, drawn, *state, guide_masks(gm, ctx))


def allowed_drafts(gm: fx.GraphModule, ctx: PassContext, draft: fx.Node) -> fx.Node:
    """Which of the drafts [B, K] the requests' guides allow: bool [B, K]."""
    _, whole, *_ = sampling_state(gm, ctx)
    node: fx.Node = emit(
        gm, allowed_by_guides, draft, whole, guide_masks(gm, ctx), find_role(gm, "row_index"),
        before=output_node(gm), num_drafts=ctx.config.num_draft_tokens,
    )  # fmt: skip
    return node


def allowed_by_guides(
    draft_BK: Any, sampling_RI: Any, mask_RSW: Any, index_B: Any, *, num_drafts: int
) -> Any:
    """True for every draft of a request without a guide."""
    place_BK = draft_BK.clamp(min=0).long()
    words_BKW = mask_RSW[index_B][:, :num_drafts]
    word_BK = words_BKW.gather(2, (place_BK // 32).unsqueeze(-1)).squeeze(-1)
    is_free_B1 = (sampling_RI[index_B][:, FLAGS] & GUIDE == 0).unsqueeze(1)
    return is_free_B1 | (word_BK >> (place_BK % 32) & 1 != 0)


def note_logprobs(gm: fx.GraphModule, ctx: PassContext, target: fx.Node) -> None:
    """Write log-probabilities of the step's tokens into state rows, for the host."""
    if ctx.greedy_only:
        return
    before = output_node(gm)
    logits = find_role(gm, "raw_logits" if has_role(gm, "raw_logits") else "logits")
    if ctx.phase == "prefill":
        logits = emit(gm, lambda x_1RV: x_1RV.squeeze(0).unsqueeze(1), logits, before=before)
    if verifies_tree(ctx):
        logits = taken_rows(gm, logits, output_widths(ctx.target)[0], before=before)
    _, whole, *_ = sampling_state(gm, ctx)
    tokens = ctx.config.num_row_tokens
    values = _buffer(gm, ctx, "logprob_RSN", (tokens, MAX_LOGPROBS + 1), torch.float32)
    ids = _buffer(gm, ctx, "logprob_id_RSN", (tokens, MAX_LOGPROBS), torch.int32)
    with gm.graph.inserting_before(before):
        gm.graph.call_function(
            torch.ops.compilespec.note_logprobs.default,
            (logits, target, find_role(gm, "row_index"), whole, values, ids),
        )


def draft_token(
    gm: fx.GraphModule,
    ctx: PassContext,
    proposal: tuple[fx.Node, ...],
    base: fx.Node,
    offset: int,
    *,
    number: int | None = None,
) -> fx.Node:
    """The draft of each request for position base + offset, [B], int32.

    Args:
        proposal: outputs of a captured "propose": the best token; the logits if the drafter offers
            them, and their target ids if their vocabulary is another one.
        number: number of the draft in the step, 1..K; None: `offset`.
    """
    token, *offered = proposal
    if offered:
        note_sureness(gm, ctx, offered[0], number or offset)
    if ctx.greedy_only:
        return token
    if not ctx.acceptance.couples_drafts:
        return _own_draft(gm, ctx, token, offered, base, offset, number or offset)
    if not offered:
        return token
    before = output_node(gm)
    drawn = emit(gm, lambda base_B: base_B + offset, base, before=before)
    real, whole, *_ = sampling_state(gm, ctx)
    logits, ids = offered[0], offered[1] if len(offered) > 1 else None
    with gm.graph.inserting_before(before):
        return gm.graph.call_function(
            torch.ops.compilespec.draw.default,
            (logits, token, ids, find_role(gm, "row_index"), drawn, real, whole),
        )


def draft_noise(
    gm: fx.GraphModule, ctx: PassContext, drawn: fx.Node, ids: fx.Node | None, num_ids: int,
    stream: int = STREAM_DRAW,
) -> tuple[fx.Node, ...]:  # fmt: skip
    """The temperature [B] and the noise [B, V] with which the target will draw the token at
    `drawn`, or that of another stream: 1 and 0 for greedy requests; nothing where all are greedy.
    """
    if ctx.greedy_only:
        return ()
    before, index = output_node(gm), find_role(gm, "row_index")
    real, whole, *_ = sampling_state(gm, ctx)
    temperature = emit(gm, drawn_temperature, real, index, before=before)
    with gm.graph.inserting_before(before):
        noise = gm.graph.call_function(
            torch.ops.compilespec.draft_noise.default,
            (index, drawn, ids, num_ids, real, whole, stream),
        )
    return temperature, noise


def drawn_temperature(sampling_RF: Any, index_B: Any) -> Any:
    """[B]: 1 for greedy requests."""
    temperature_B = sampling_RF[index_B][:, TEMPERATURE]
    return torch.where(temperature_B >= MIN_TEMPERATURE, temperature_B, 1)


# --- drafts drawn with independent noise, and the distributions that they are drawn from ---


def _own_draft(
    gm: fx.GraphModule,
    ctx: PassContext,
    token: fx.Node,
    offered: list[fx.Node],
    base: fx.Node,
    offset: int,
    number: int,
) -> fx.Node:
    """Draft `number`, drawn from a distribution over the target's ids, or the token itself if the
    drafter offers no logits.  The distribution is kept if the rule reads it (role
    `draft_probs.<number>`).
    """
    if not gives_draft_probs(ctx):
        return token
    before, index = output_node(gm), find_role(gm, "row_index")
    real, whole, *_ = sampling_state(gm, ctx)
    (vocab_size,) = output_widths(ctx.target)
    width = offered[0].meta["example"][0][-1] if offered else vocab_size
    probs = emit(
        gm, draft_probs, token, real, index, *offered, before=before, vocab_size=vocab_size,
        num_missing=vocab_size - width, dtype=wide_dtype(ctx),
    )  # fmt: skip
    probs.meta["role"] = f"draft_probs.{number}"
    drawn, stream = emit(gm, draft_place, base, before=before, offset=offset, number=number)
    with gm.graph.inserting_before(before):
        return gm.graph.call_function(
            torch.ops.compilespec.draw_weighted.default, (probs, index, drawn, stream, whole)
        )


def gives_draft_probs(ctx: PassContext) -> bool:
    """Whether the drafter offers logits with its proposals."""
    calls = (call for name, call in ctx.draft.items() if name.startswith("propose"))
    return any(len(output_widths(call)) > 1 for call in calls)


def head_width(ctx: PassContext) -> int:
    """Ids that the drafter's head knows, of a drafter that offers logits."""
    proposals = (call for name, call in ctx.draft.items() if name.startswith("propose"))
    return output_widths(next(proposals))[1]


def keep_draft_probs(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Write the distributions of the step's drafts into state rows, for the next step's rule."""
    is_read = ctx.acceptance.reads_draft_probs and ctx.config.tree is None
    if not (is_read and gives_draft_probs(ctx)):
        return
    numbers = range(1, ctx.config.num_draft_tokens + 1)
    parts = [find_role(gm, f"draft_probs.{number}") for number in numbers]
    emit(
        gm, write_draft_probs, _draft_prob_rows(gm, ctx), find_role(gm, "row_index"), *parts,
        before=output_node(gm), num_missing=ctx.config.num_row_tokens - 1 - len(parts),
    )  # fmt: skip


def read_draft_probs(gm: fx.GraphModule, ctx: PassContext, draft: fx.Node) -> fx.Node:
    """The distributions of the drafts [B, K]: [B, K, V]; 1 at a draft whose own is unknown."""
    end, count = output_node(gm), ctx.config.num_draft_tokens
    if gives_draft_probs(ctx):
        node: fx.Node = emit(
            gm, lambda rows, index_B: rows[index_B][:, :count], _draft_prob_rows(gm, ctx),
            find_role(gm, "row_index"), before=end,
        )  # fmt: skip
        return node
    (vocab_size,) = output_widths(ctx.target)
    node = emit(gm, one_hot, draft, before=end, vocab_size=vocab_size, dtype=wide_dtype(ctx))
    return node


def _draft_prob_rows(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    (vocab_size,) = output_widths(ctx.target)
    shape = (ctx.config.num_row_tokens - 1, vocab_size)
    return _buffer(gm, ctx, "draft_prob_RKV", shape, wide_dtype(ctx))


def wide_dtype(ctx: PassContext) -> torch.dtype:
    """The dtype in which probabilities are computed."""
    return torch.promote_types(ctx.config.dtype, torch.float32)


def draft_probs(
    token_B: Any, sampling_RF: Any, index_B: Any, *offered: Any, vocab_size: int, num_missing: int,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """Softmax of the drafter's logits at the request's temperature, over the target's ids [B, V]; 1
    at the token if the request is greedy or there are no logits.  `num_missing`: ids that the
    drafter's head lacks if it has no vocabulary of its own.
    """
    greedy_BV = one_hot(token_B, vocab_size=vocab_size, dtype=dtype)
    if not offered:
        return greedy_BV
    logits_BV, *ids = offered
    temperature_B1 = sampling_RF[index_B][:, TEMPERATURE].unsqueeze(1)
    is_drawn_B1 = temperature_B1 >= MIN_TEMPERATURE
    scale_B1 = torch.where(is_drawn_B1, temperature_B1, 1).to(dtype)
    scores_BV = logits_BV.to(dtype) / scale_B1
    if ids:
        scores_BV = torch.where(ids[0] >= 0, scores_BV, -math.inf)
    probs_BV = scores_BV.softmax(-1)
    if ids:
        zeros_BV = torch.zeros_like(greedy_BV)
        probs_BV = zeros_BV.index_add(1, ids[0].clamp(min=0), probs_BV)
    else:
        probs_BV = functional.pad(probs_BV, (0, num_missing))
    return torch.where(is_drawn_B1, probs_BV, greedy_BV)


def one_hot(token: Any, *, vocab_size: int, dtype: torch.dtype) -> Any:
    """[..., V]: 1 at the token; all 0 if it is PAD."""
    return (token.unsqueeze(-1) == arange_like(token, vocab_size)).to(dtype)


def draft_place(base_B: Any, *, offset: int, number: int) -> tuple[Any, Any]:
    """Position and stream word of a draft, int32 [B]."""
    drawn_B = base_B + offset
    return drawn_B, torch.full_like(drawn_B, STREAM_DRAFT + STEP * number)


def write_draft_probs(rows_RKV: Any, index_B: Any, *probs_BV: Any, num_missing: int) -> Any:
    """Append zeros for the drafts that a step of a smaller K does not make."""
    parts = [*probs_BV, *[torch.zeros_like(probs_BV[0])] * num_missing]
    return rows_RKV.index_put_((index_B,), torch.stack(parts, 1))


def drawn_positions(start_B: Any, depth_BS: Any = None, *, num_tokens: int) -> Any:
    """Row s holds the token at start + s, of a tree at start + its depth, and draws the next one,
    int32 [B, S].
    """
    place = arange_like(start_B, num_tokens) if depth_BS is None else depth_BS
    return start_B.unsqueeze(1) + (place + 1)


def prefill_choice(logits_1RV: Any, start_R: Any) -> tuple[Any, Any, Any]:
    """Logits [R, 1, V], their argmax, and the position after each prompt, int32 [R, 1]."""
    logits_R1V = logits_1RV.squeeze(0).unsqueeze(1)
    return logits_R1V, logits_R1V.argmax(-1).to(torch.int32), start_R.unsqueeze(1)


def sampling_state(gm: fx.GraphModule, ctx: PassContext) -> tuple[fx.Node, ...]:
    """The state rows of sampling: two of parameters, logit bias, tokens by position."""
    (vocab_size,) = output_widths(ctx.target)
    real, whole, bias = (
        _buffer(gm, ctx, name, (width,), dtype, by_host=True)
        for name, width, dtype in (
            ("sampling_RF", NUM_FLOATS, torch.float32),
            ("sampling_RI", NUM_INTS, torch.int32),
            ("bias_RV", vocab_size, torch.float32),
        )
    )
    context = _buffer(gm, ctx, "context_RL", (ctx.config.max_seq_len,), torch.int32)
    return real, whole, bias, context


def guide_masks(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """Which ids a guided request may choose at each row of its window, one bit per id."""
    (vocab_size,) = output_widths(ctx.target)
    shape = (ctx.config.num_row_tokens, -(-vocab_size // 32))
    return _buffer(gm, ctx, "mask_RSW", shape, torch.int32, by_host=True)


def _buffer(
    gm: fx.GraphModule,
    ctx: PassContext,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    by_host: bool = False,
) -> fx.Node:
    rows = ctx.config.max_batch_size + 1  # the last one is spare
    buffer = BufferSpec(name=name, kind="state", shape=(rows, *shape), dtype=dtype, by_host=by_host)
    return add_buffer(gm, ctx, buffer)
