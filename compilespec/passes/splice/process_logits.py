"""Changes logits before sampling: a processor traced into the step, and processors on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import compilespec.ops.host_process  # noqa: F401  (registers the operator)
from compilespec.ops.sample.layout import PROMPT_LEN
from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.sampling import drawn_positions, sampling_state
from compilespec.passes.splice.trees import depth_of_rows, verifies_tree
from compilespec.program import PAD


def num_processors(ctx: PassContext) -> int | None:
    """The number of processors to splice; None if there is none."""
    return (ctx.logits_processor is not None) + ctx.config.features.host_processors or None


def process_logits(step: Splice) -> int:
    """Replace the logits that acceptance reads by the output of the engine's processor, then of the
    processors of single requests on the host.

    Roles made: `logits` moves to the result; `raw_logits` marks the original, for
    log-probabilities.
    Numerics: rounding.  Torch IR.
    """
    roles, ctx = step.roles, step.ctx
    raw = logits = roles.logits
    if not step.is_decode:  # [1, R, V]: every request's last row
        logits = logits.squeeze(0).unsqueeze(1)
    if ctx.logits_processor is not None:
        logits = _traced(step, logits)
    if ctx.config.features.host_processors:
        handles = step.state("processor_R", (), torch.int64, by_host=True)
        path = (roles.path,) if verifies_tree(ctx) else ()
        logits = torch.ops.compilespec.host_process.default(
            logits, _last_tokens(step), roles.row_index, handles, *path
        )
    if not step.is_decode:
        logits = logits.squeeze(1).unsqueeze(0)
    roles.raw_logits, roles.logits = raw, logits
    step.set_outputs({"logits": logits})
    return num_processors(ctx) or 0


def _traced(step: Splice, logits: Tensor) -> Tensor:
    """The output of the engine's processor, [B, S, V]."""
    ctx, processor = step.ctx, step.ctx.logits_processor
    assert processor is not None, "checked by the caller"
    traced = processor.capture(ctx.phase, ctx.config)
    known: dict[str, Callable[[], Tensor]] = {
        "logits_BSV": lambda: logits,
        "position_BS": lambda: _positions(step),
        "ids_BS": lambda: _last_tokens(step),
        "context_BL": lambda: _context(step),
        "prompt_len_B": lambda: _prompt_lengths(step),
    }
    (changed,) = step.fragment(traced, **{name: known[name]() for name in traced.arguments})
    return changed


def _positions(step: Splice) -> Tensor:
    if not step.is_decode:
        return step.roles.start.unsqueeze(1)
    return step.call(drawn_positions, step.roles.start, depth_of_rows(step))


def _last_tokens(step: Splice) -> Tensor:
    """The token before the one that each row chooses, [B, S]; in prefill the prompt's last."""
    if step.is_decode:
        return step.roles.ids
    return step.roles.ids.squeeze(0)[step.roles.last_R.long()].unsqueeze(1)


def _prompt_lengths(step: Splice) -> Tensor:
    return sampling_state(step).whole[step.roles.row_index][:, PROMPT_LEN]


def _context(step: Splice) -> Tensor:
    """Write the call's tokens into the context rows and read those of its requests."""
    roles, length = step.roles, step.config.max_seq_len
    context = step.state("processed_RL", (length,), torch.int32, fill=PAD)
    return step.call(write_and_read, context, roles.ids, roles.position, roles.row, roles.row_index)


def write_and_read(
    context_RL: Tensor,
    ids: Tensor,
    position: Tensor,
    row: Tensor,
    index_B: Tensor,
    *,
    spare_row: int,
) -> Tensor:
    """The rows of a call's requests, [B, L], with its tokens at their positions; -1 reads as 0."""
    row = torch.where(row >= 0, row, spare_row).long()
    context_RL.index_put_((row, position.long()), ids)
    return context_RL[index_B].clamp(min=0)
