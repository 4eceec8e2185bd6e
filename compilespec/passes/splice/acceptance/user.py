"""Rules that are functions of probabilities: users' own, and the shipped ones.

The function is captured and spliced into the step.  This module makes its inputs and draws the
token after the accepted drafts.  Its contract: `compilespec.acceptance_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.ops.sample import layout
from compilespec.passes.context import PassContext
from compilespec.passes.graph.nodes import output_node
from compilespec.passes.splice.acceptance import strict
from compilespec.passes.splice.acceptance.base import Judged, Rule
from compilespec.passes.splice.acceptance.rule import RuleFunction
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.sampling import (
    allowed_drafts,
    drawn_positions,
    read_draft_probs,
    sampling_state,
    target_probs,
    wide_dtype,
)
from compilespec.program import PAD, Traced
from compilespec.tracing.capture import fresh, trace_call

_EXAMPLE_BATCHES = (7, 11, 13, 17)  # traced with one that equals no other size


def decode(step: Splice, ids: Tensor) -> Judged:
    probs = target_probs(step)
    draft, num_drafts = judged_drafts(ids)
    if step.config.num_draft_tokens:
        count, token = _judge(step, probs, draft, num_drafts)
    else:
        count, token = num_drafts, _draw_last(step, probs.squeeze(1), num_drafts, num_drafts)
    return Judged(*step.call(emit_tokens, draft, count, token))


def _judge(step: Splice, probs: Tensor, draft: Tensor, num_drafts: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts the rule accepts, and the token after them, both [B]."""
    rule, vocab = trace_rule(step.ctx), step.config.vocab_size
    made: dict[str, Callable[[], Tensor]] = {
        "probs_BSV": lambda: probs,
        "logits_BSV": lambda: step.roles.logits,
        "draft_probs_BKV": lambda: read_draft_probs(step, draft),
        "draft_BK": lambda: draft,
        "num_drafts_B": lambda: num_drafts,
        "uniform_BK": lambda: _uniform(step),
        "parents_BS": lambda: step.call(rows_before, draft),
    }
    count, last = step.fragment(rule, **{name: made[name]() for name in rule.arguments})
    allowed = allowed_drafts(step, draft)
    if gives_weights(rule):
        count, weights = limit_weights(
            count, num_drafts, allowed, last, probs, vocab_size=vocab, dtype=wide_dtype(step.ctx)
        )
        return count, _draw_last(step, weights, count, num_drafts)
    return limit_token(count, num_drafts, allowed, last, vocab_size=vocab)


def _uniform(step: Splice) -> Tensor:
    """A number in (0, 1) for each draft, [B, K]."""
    roles, num_drafts = step.roles, step.config.num_draft_tokens
    drawn = drawn_positions(roles.start, num_verify_tokens=num_drafts)
    stream = step.call(accept_streams, drawn)
    whole = sampling_state(step).whole
    uniform: Tensor = torch.ops.compilespec.uniform_noise.default(
        roles.row_index, drawn, stream, whole
    )
    return uniform


def _draw_last(step: Splice, weights: Tensor, count: Tensor, num_drafts: Tensor) -> Tensor:
    """The token after the accepted drafts, [B], drawn by its weights."""
    drawn, stream = last_place(step.roles.start, count, num_drafts)
    whole = sampling_state(step).whole
    token: Tensor = torch.ops.compilespec.draw_weighted.default(
        weights, step.roles.row_index, drawn, stream, whole
    )
    return token


# --- the function ---


def trace_rule(ctx: PassContext) -> Traced:
    """The program's rule as a graph of [B, ..] tensors, B symbolic.  Raises: InvalidOption,
    TraceError.
    """
    rule, made = _rule(ctx), _examples(ctx)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        count_B, last = rule.function(**dict(zip(rule.inputs, tensors, strict=True)))
        return fresh((count_B.to(torch.int32), last))

    module = rule.function if isinstance(rule.function, nn.Module) else nn.Module()
    arguments = {name: made[name] for name in rule.inputs}
    traced = trace_call(module, call, arguments, name="acceptance", owner="acceptance")
    results: Any = output_node(traced.graph_module).args[0]
    count, last = (node.meta["example_value"] for node in results)
    vocab = ctx.config.vocab_size
    is_token = last.dim() == 1 and not last.dtype.is_floating_point
    is_weights = last.dim() == 2 and last.shape[1] == vocab and last.dtype.is_floating_point
    if count.dim() != 1 or not (is_token or is_weights):
        raise InvalidOption(
            f"acceptance={rule.name}: expected a count [B] and weights [B, {vocab}] or ids [B]; "
            f"got {list(count.shape)} and {last.dtype} {list(last.shape)}"
        )
    return traced


def _examples(ctx: PassContext) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """What a rule may read, with the dimensions that vary: see `trace_call`."""
    config, wide, vocab = ctx.config, wide_dtype(ctx), ctx.config.vocab_size
    num_drafts, num_tokens = config.num_verify_tokens - 1, config.num_verify_tokens
    sizes = (num_drafts, num_tokens, vocab)
    batch = next(size for size in _EXAMPLE_BATCHES if size not in sizes)

    def example(dtype: torch.dtype, *shape: int) -> tuple[Tensor, tuple[int, ...]]:
        return torch.zeros(batch, *shape, dtype=dtype, device=config.device), (0,)

    return {
        "probs_BSV": example(wide, num_tokens, vocab),
        "logits_BSV": example(config.dtype, num_tokens, vocab),
        "draft_probs_BKV": example(wide, num_drafts, vocab),
        "draft_BK": example(torch.int32, num_drafts),
        "num_drafts_B": example(torch.int32),
        "uniform_BK": example(torch.float32, num_drafts),
        "parents_BS": example(torch.int32, num_tokens),
    }


def gives_weights(traced: Traced) -> bool:
    """True where the rule gives weights for the token after the accepted drafts, not its id."""
    results: Any = output_node(traced.graph_module).args[0]
    return bool(results[1].meta["example_value"].dim() == 2)


def _rule(ctx: PassContext) -> RuleFunction:
    assert ctx.acceptance.function is not None
    return ctx.acceptance.function


# --- tensor code ---


def judged_drafts(ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The drafts [B, K], and how many precede the first PAD, int32 [B]."""
    draft_BK = ids_BS[:, 1:]
    return draft_BK, _num_leading(draft_BK >= 0)


def _num_leading(is_so_BK: Tensor) -> Tensor:
    """The number of leading True entries, int32 [B]."""
    return is_so_BK.to(torch.int32).cumprod(1).sum(1).to(torch.int32)


def rows_before(draft_BK: Tensor, *, num_verify_tokens: int) -> Tensor:
    """The row that each row of a chain follows, int32 [B, S]."""
    before_S = (arange_like(draft_BK, num_verify_tokens) - 1).clamp(min=0)
    return (before_S + torch.zeros_like(draft_BK[:, :1])).to(torch.int32)


def accept_streams(drawn_BK: Tensor, *, num_draft_tokens: int) -> Tensor:
    """Stream word of each draft's uniform number, int32 [B, K]."""
    step_K = arange_like(drawn_BK, num_draft_tokens) + 1
    return (step_K * layout.STEP + layout.STREAM_ACCEPT).expand_as(drawn_BK)


def last_place(start_B: Tensor, count_B: Tensor, num_drafts_B: Tensor) -> tuple[Tensor, Tensor]:
    """Position and stream word of the token after `count` drafts, int32 [B]."""
    step_B = count_B + 1
    stream_B = torch.where(count_B < num_drafts_B, layout.STREAM_RECOVER, layout.STREAM_BONUS)
    return start_B + step_B, (step_B * layout.STEP + stream_B).to(torch.int32)


def limit_weights(
    count_B: Tensor,
    num_drafts_B: Tensor,
    is_allowed_BK: Tensor,
    weights_BV: Tensor,
    probs_BSV: Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
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
    count_B: Tensor,
    num_drafts_B: Tensor,
    is_allowed_BK: Tensor,
    token_B: Tensor,
    *,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Accept no draft that must not be judged or that a guide forbids; an id outside the vocabulary
    is clamped.
    """
    count_B = torch.minimum(count_B.clamp(min=0), num_drafts_B)
    count_B = torch.minimum(count_B, _num_leading(is_allowed_BK))
    return count_B, token_B.clamp(0, vocab_size - 1).to(torch.int32)


def emit_tokens(
    draft_BK: Tensor, count_B: Tensor, token_B: Tensor, *, num_verify_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(target, emitted, count): the accepted drafts and the token after them; later entries of
    `target` are harmless ids.
    """
    token_B1, count_B1 = token_B.unsqueeze(1), count_B.unsqueeze(1)
    step_S = arange_like(token_B, num_verify_tokens)
    proposed_BS = torch.cat([draft_BK.clamp(min=0), token_B1], 1)
    target_BS = torch.where(step_S == count_B1, token_B1, proposed_BS)
    emitted_BS = torch.where(step_S <= count_B1, target_BS, PAD)
    return target_BS, emitted_BS, count_B + 1


RULE = Rule(lossless=None, decode=decode, prefill=strict.prefill)
