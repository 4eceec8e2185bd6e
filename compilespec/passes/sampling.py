"""Tokens are chosen on the device: the state rows of sampling, and the operators that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import compilespec.ops.sample  # noqa: F401  (registers the operators)
from compilespec.methods.capture import output_widths
from compilespec.ops.sample.layout import MAX_LOGPROBS, NUM_FLOATS, NUM_INTS
from compilespec.passes.graph import add_buffer, arange_like, emit, find_role, output_node
from compilespec.passes.runner import PassContext
from compilespec.program import BufferSpec


def sample_target(gm: fx.GraphModule, ctx: PassContext, *, before: fx.Node) -> fx.Node:
    """The target's token at every row of `logits`: [B, S], or [R, 1] in prefill, int32.

    The argmax stays a node of its own, and is what rows get that ask for nothing else; the operator
    overrides the others.  Decode hands it the tokens that were fed, for penalties; the prompt is
    written by the host.
    """
    logits, index = find_role(gm, "logits"), find_role(gm, "row_index")
    start = find_role(gm, "start")
    if ctx.phase == "decode":
        greedy = emit(gm, lambda x_BSV: x_BSV.argmax(-1).to(torch.int32), logits, before=before)
        num_tokens = ctx.config.num_verify_tokens
        drawn = emit(gm, drawn_positions, start, before=before, num_tokens=num_tokens)
        ids: fx.Node | None = find_role(gm, "ids")
    else:
        logits, greedy, drawn = emit(gm, prefill_choice, logits, start, before=before)
        ids = None
    real, whole, bias, context = sampling_state(gm, ctx)
    mask = _guide_masks(gm, ctx)
    with gm.graph.inserting_before(before):
        return gm.graph.call_function(
            torch.ops.compilespec.sample.default,
            (logits, greedy, ids, index, drawn, real, whole, bias, context, mask),
        )


def note_logprobs(gm: fx.GraphModule, ctx: PassContext, target: fx.Node) -> None:
    """Log-probabilities of the step's tokens go to state rows, which the host reads if asked."""
    before, logits = output_node(gm), find_role(gm, "logits")
    if ctx.phase == "prefill":
        logits = emit(gm, lambda x_1RV: x_1RV.squeeze(0).unsqueeze(1), logits, before=before)
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
    gm: fx.GraphModule, ctx: PassContext, proposal: tuple[fx.Node, ...], base: fx.Node, offset: int
) -> fx.Node:
    """The draft of each request for position base + offset, [B], int32.

    Args:
        proposal: outputs of a captured "propose": the best token; the logits where the drafter
            offers them, and their target ids where they are of another vocabulary.
    """
    token, *offered = proposal
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


def drawn_positions(start_B: Any, *, num_tokens: int) -> Any:
    """Row s holds the token at start + s and draws the next one, int32 [B, S]."""
    return start_B.unsqueeze(1) + (arange_like(start_B, num_tokens) + 1)


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


def _guide_masks(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """Which ids a guided request may choose at each row of its window, a bit an id."""
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
