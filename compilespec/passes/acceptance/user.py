"""Rules that are functions of probabilities: users' own, and the shipped ones.

The function is captured and spliced into the step.  This module makes its inputs and draws the
token after the accepted drafts.  Its contract: `compilespec.acceptance_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec.errors import InvalidOption
from compilespec.ops.sample import layout
from compilespec.passes.acceptance import strict
from compilespec.passes.acceptance.base import Judged, Rule
from compilespec.passes.acceptance.rule import RuleFunction
from compilespec.passes.context import PassContext
from compilespec.passes.graph import arange_like, emit, find_role, output_node, splice
from compilespec.passes.sampling import (
    allowed_drafts,
    drawn_positions,
    read_draft_probs,
    sampling_state,
    target_probs,
    wide_dtype,
)
from compilespec.program import PAD, Traced
from compilespec.tracing.capture import fresh, output_widths, trace_call

_EXAMPLE_BATCHES = (7, 11, 13, 17)  # traced with one that equals no other size


def decode(gm: fx.GraphModule, ctx: PassContext, ids: fx.Node, logits: fx.Node) -> Judged:
    end, config = output_node(gm), ctx.config
    probs = target_probs(gm, ctx, before=end)
    draft, num_drafts = emit(gm, judged_drafts, ids, before=end)
    if config.num_draft_tokens:
        count, token = _judge(gm, ctx, probs, logits, draft, num_drafts)
    else:
        weights = emit(gm, lambda p_B1V: p_B1V.squeeze(1), probs, before=end)
        count, token = num_drafts, _draw_last(gm, ctx, weights, num_drafts, num_drafts)
    target, emitted, number = emit(
        gm, emit_tokens, draft, count, token, before=end, num_tokens=config.num_verify_tokens
    )
    return Judged(target, emitted, number)


def _judge(
    gm: fx.GraphModule,
    ctx: PassContext,
    probs: fx.Node,
    logits: fx.Node,
    draft: fx.Node,
    num_drafts: fx.Node,
) -> tuple[fx.Node, fx.Node]:
    """How many drafts the rule accepts, and the token after them, both [B]."""
    end, traced, num_tokens = output_node(gm), trace_rule(ctx), ctx.config.num_verify_tokens
    made: dict[str, Callable[[], fx.Node]] = {
        "probs_BSV": lambda: probs,
        "logits_BSV": lambda: logits,
        "draft_probs_BKV": lambda: read_draft_probs(gm, ctx, draft),
        "draft_BK": lambda: draft,
        "num_drafts_B": lambda: num_drafts,
        "uniform_BK": lambda: _uniform(gm, ctx),
        "parents_BS": lambda: emit(gm, rows_before, draft, before=end, num_tokens=num_tokens),
    }
    reads = [entry.name for entry in traced.inputs if entry.kind == "argument"]
    count, last = splice(gm, ctx, traced, {name: made[name]() for name in reads})
    (vocab,), allowed = output_widths(ctx.target), allowed_drafts(gm, ctx, draft)
    if gives_weights(traced):
        count, weights = emit(
            gm, limit_weights, count, num_drafts, allowed, last, probs, before=end,
            vocab_size=vocab, dtype=wide_dtype(ctx),
        )  # fmt: skip
        return count, _draw_last(gm, ctx, weights, count, num_drafts)
    count, token = emit(
        gm, limit_token, count, num_drafts, allowed, last, before=end, vocab_size=vocab
    )
    return count, token


def _uniform(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """A number in (0, 1) for each draft, [B, K]."""
    end, count = output_node(gm), ctx.config.num_draft_tokens
    drawn = emit(gm, drawn_positions, find_role(gm, "start"), before=end, num_tokens=count)
    stream = emit(gm, accept_streams, drawn, before=end, num_drafts=count)
    _, whole, *_ = sampling_state(gm, ctx)
    with gm.graph.inserting_before(end):
        return gm.graph.call_function(
            torch.ops.compilespec.uniform_noise.default,
            (find_role(gm, "row_index"), drawn, stream, whole),
        )


def _draw_last(
    gm: fx.GraphModule, ctx: PassContext, weights: fx.Node, count: fx.Node, num_drafts: fx.Node
) -> fx.Node:
    """The token after the accepted drafts, [B], drawn by its weights."""
    end = output_node(gm)
    drawn, stream = emit(gm, last_place, find_role(gm, "start"), count, num_drafts, before=end)
    _, whole, *_ = sampling_state(gm, ctx)
    with gm.graph.inserting_before(end):
        return gm.graph.call_function(
            torch.ops.compilespec.draw_weighted.default,
            (weights, find_role(gm, "row_index"), drawn, stream, whole),
        )


# --- the function ---


def trace_rule(ctx: PassContext) -> Traced:
    """The program's rule as a graph of [B, ..] tensors, B symbolic.  Raises: InvalidOption,
    TraceError.
    """
    rule, config = _rule(ctx), ctx.config
    (vocab,) = output_widths(ctx.target)
    num_drafts, num_tokens = config.num_verify_tokens - 1, config.num_verify_tokens
    wide = wide_dtype(ctx)
    sizes = (num_drafts, num_tokens, vocab)
    batch = next(size for size in _EXAMPLE_BATCHES if size not in sizes)

    def example(dtype: torch.dtype, *shape: int) -> tuple[Tensor, tuple[int, ...]]:
        return torch.zeros(batch, *shape, dtype=dtype, device=config.device), (0,)

    made = {
        "probs_BSV": example(wide, num_tokens, vocab),
        "logits_BSV": example(config.dtype, num_tokens, vocab),
        "draft_probs_BKV": example(wide, num_drafts, vocab),
        "draft_BK": example(torch.int32, num_drafts),
        "num_drafts_B": example(torch.int32),
        "uniform_BK": example(torch.float32, num_drafts),
        "parents_BS": example(torch.int32, num_tokens),
    }

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        count_B, last = rule.function(**dict(zip(rule.inputs, tensors, strict=True)))
        return fresh((count_B.to(torch.int32), last))

    module = rule.function if isinstance(rule.function, nn.Module) else nn.Module()
    arguments = {name: made[name] for name in rule.inputs}
    traced = trace_call(module, call, arguments, name="acceptance", owner="acceptance")
    results: Any = output_node(traced.graph_module).args[0]
    count, last = (node.meta["example_value"] for node in results)
    is_token = last.dim() == 1 and not last.dtype.is_floating_point
    is_weights = last.dim() == 2 and last.shape[1] == vocab and last.dtype.is_floating_point
    if count.dim() != 1 or not (is_token or is_weights):
        raise InvalidOption(
            f"acceptance={rule.name}: expected a count [B] and weights [B, {vocab}] or ids [B]; "
            f"got {list(count.shape)} and {last.dtype} {list(last.shape)}"
        )
    return traced


def gives_weights(traced: Traced) -> bool:
    """Whether the rule gives weights for the token after the accepted drafts, not its id."""
    results: Any = output_node(traced.graph_module).args[0]
    return bool(results[1].meta["example_value"].dim() == 2)


def _rule(ctx: PassContext) -> RuleFunction:
    assert ctx.acceptance.function is not None
    return ctx.acceptance.function


# --- tensor code ---


def judged_drafts(ids_BS: Any) -> tuple[Any, Any]:
    """The drafts [B, K], and how many precede the first PAD, int32 [B]."""
    draft_BK = ids_BS[:, 1:]
    return draft_BK, _num_leading(draft_BK >= 0)


def _num_leading(is_so_BK: Any) -> Any:
    """The number of leading True entries, int32 [B]."""
    return is_so_BK.to(torch.int32).cumprod(1).sum(1).to(torch.int32)


def rows_before(draft_BK: Any, *, num_tokens: int) -> Any:
    """The row that each row of a chain follows, int32 [B, S]."""
    before_S = (arange_like(draft_BK, num_tokens) - 1).clamp(min=0)
    return (before_S + torch.zeros_like(draft_BK[:, :1])).to(torch.int32)


def accept_streams(drawn_BK: Any, *, num_drafts: int) -> Any:
    """Stream word of each draft's uniform number, int32 [B, K]."""
    step_K = arange_like(drawn_BK, num_drafts) + 1
    return (step_K * layout.STEP + layout.STREAM_ACCEPT).expand_as(drawn_BK)


def last_place(start_B: Any, count_B: Any, num_drafts_B: Any) -> tuple[Any, Any]:
    """Position and stream word of the token after `count` drafts, int32 [B]."""
    step_B = count_B + 1
    stream_B = torch.where(count_B < num_drafts_B, layout.STREAM_RECOVER, layout.STREAM_BONUS)
    return start_B + step_B, (step_B * layout.STEP + stream_B).to(torch.int32)


def limit_weights(
    count_B: Any, num_drafts_B: Any, is_allowed_BK: Any, weights_BV: Any, probs_BSV: Any, *,
    vocab_size: int, dtype: torch.dtype,
) -> tuple[Any, Any]:  # fmt: skip
    """Accept no draft that must not be judged or that a guide forbids; rows without a weight, or
    cut short by a guide, take the target's own.
    """
    wanted_B = torch.minimum(count_B.clamp(min=0), num_drafts_B)
    count_B = torch.minimum(wanted_B, _num_leading(is_allowed_BK))
    place_B1V = count_B.long().view(-1, 1, 1).expand(-1, 1, vocab_size)
    own_BV = probs_BSV.gather(1, place_B1V).squeeze(1)
    is_given_B1 = (weights_BV > 0).any(-1, keepdim=True) & (count_B == wanted_B).unsqueeze(1)
    return count_B, torch.where(is_given_B1, weights_BV.to(dtype), own_BV)


def limit_token(
    count_B: Any, num_drafts_B: Any, is_allowed_BK: Any, token_B: Any, *, vocab_size: int
) -> tuple[Any, Any]:
    """Accept no draft that must not be judged or that a guide forbids; an id outside the vocabulary
    is clamped.
    """
    count_B = torch.minimum(count_B.clamp(min=0), num_drafts_B)
    count_B = torch.minimum(count_B, _num_leading(is_allowed_BK))
    return count_B, token_B.clamp(0, vocab_size - 1).to(torch.int32)


def emit_tokens(
    draft_BK: Any, count_B: Any, token_B: Any, *, num_tokens: int
) -> tuple[Any, Any, Any]:
    """(target, emitted, count): the accepted drafts and the token after them; later entries of
    `target` are harmless ids.
    """
    token_B1, count_B1 = token_B.unsqueeze(1), count_B.unsqueeze(1)
    step_S = arange_like(token_B, num_tokens)
    proposed_BS = torch.cat([draft_BK.clamp(min=0), token_B1], 1)
    target_BS = torch.where(step_S == count_B1, token_B1, proposed_BS)
    emitted_BS = torch.where(step_S <= count_B1, target_BS, PAD)
    return target_BS, emitted_BS, count_B + 1


RULE = Rule(lossless=None, decode=decode, prefill=strict.prefill)
