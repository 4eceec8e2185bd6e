"""Masked drafting: a separate causal model, taught to draft all K tokens in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.calls import next_position, run, single_token
from compilespec.passes.splice.draft_loops.parallel import (
    newest_and_masked,
    propose_all,
    put_first,
)
from compilespec.passes.splice.draft_loops.unshifted import emitted_rows, translated
from compilespec.passes.splice.insert_paged_attention import Branches
from compilespec.passes.splice.places import Places, live_row, step_places, unwritten
from compilespec.tracing.capture import output_widths


def masked(step: Splice) -> int:
    """Draft with token x_p in slot p of the drafter's cache, as `unshifted` does, all drafts in one
    pass: K-1 masked rows follow the newest token.  Makes the role `drafts` ([B, K], int32).

    The row of the newest token gives draft 1 and masked row i draft i+1.  A masked row sees the
    committed tokens in the cache and, by a path, the masked rows before it; it writes nothing.
    Decode: the S target tokens at seq_len+1 .. seq_len+S, and the masked rows.  Prefill: the prompt
    at its positions, then the sampled token and its masked rows.
    Source: An et al. 2025 (PARD).
    """
    roles, newest = step.roles, next_position(step)
    if step.is_decode:
        (ids, true), num_emitted = emitted_rows(step), roles.num_emitted
    else:
        run(step, "forward", step_places(step), input_ids=translated(step, roles.ids))
        ids, true = single_token(step, roles.target.squeeze(1), newest, live_row(step), 1)
        num_emitted = torch.ones_like(newest)
    logits = _one_pass(step, newest, translated(step, ids), true, num_emitted)
    roles.drafts = propose_all(
        step, logits, newest, step.config.num_draft_tokens, argument="logits_BV"
    )
    return num_masked_passes(step.ctx)


def num_masked_passes(ctx: PassContext) -> int:
    """Passes of the drafter that `masked` splices: one, and in prefill the prompt's."""
    return 1 + (ctx.phase == "prefill")


def _one_pass(step: Splice, newest: Tensor, ids: Tensor, true: Places, count: Tensor) -> Tensor:
    """The logits of the newest token's row and of the masked ones, [B, K, V].

    Args: ids: the draft model's; count: of the true rows, those up to the newest token, [B].
    """
    num_masked, branches = step.config.num_draft_tokens - 1, None
    places = true
    if num_masked:
        ahead = torch.arange(1, num_masked + 1, dtype=newest.dtype, device=newest.device)
        hidden = unwritten(step, newest.unsqueeze(1) + ahead)
        (masked_ids,) = step.fragment("mask", position_ids=hidden.position)
        ids, slot, row, position, path = put_first(
            (masked_ids, *hidden[:3]), (ids, *true[:3]), num_masked=num_masked
        )
        places, branches = Places(slot, row, position, true.table), Branches(path=path)
    (logits,) = run(step, "forward", places, branches=branches, input_ids=ids)
    width = output_widths(step.ctx.draft["forward"])[0]
    return newest_and_masked(logits, count, num_masked=num_masked, width=width)
