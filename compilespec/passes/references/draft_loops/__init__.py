"""The draft loop driven from Python: the drafter's captured calls, one after the other.

Every call has the shape it has in the step; its attention and its recurrent layers are the step's
operators on metadata computed in plain Python, so that the result must be equal bit for bit.
Each kind of loop is a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compilespec.errors import NotSupported
from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.passes.references.draft_loops.block import block, write_context
from compilespec.passes.references.draft_loops.combined import combined
from compilespec.passes.references.draft_loops.direct import callback, direct, write_history
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.passes.references.draft_loops.heads import heads
from compilespec.passes.references.draft_loops.in_place import in_place
from compilespec.passes.references.draft_loops.masked import masked
from compilespec.passes.references.draft_loops.parallel import parallel
from compilespec.passes.references.draft_loops.recycled import recycled
from compilespec.passes.references.draft_loops.shared_kv import shared_kv
from compilespec.passes.references.draft_loops.unshifted import unshifted
from compilespec.passes.references.draft_loops.windowed import windowed
from compilespec.passes.references.evidence import evidence_of
from compilespec.passes.references.kept_inputs import keep_step
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.program import PAD

Loop = Callable[[Drafts, Values], Tensor]
LOOP_REFERENCES: Mapping[str, Loop] = {
    "recycled": recycled,
    "parallel": parallel,
    "block": block,
    "windowed": windowed,
    "unshifted": unshifted,
    "masked": masked,
    "direct": direct,
    "heads": heads,
    "shared_kv": shared_kv,
    "in_place": in_place,
    "callback": callback,
}

# Roles that loops make, and a reference does not.
MADE_BY_LOOPS = ("draft_probs.", "sure.", "confidence")

# Names of the buffers that loops read and write.
WRITTEN_BY_LOOPS = ("cache.draft", "recurrence.draft", "causal_conv.draft", "ring_")


def splice_draft_loop(before: Before, ctx: PassContext, case: Case) -> Values:
    """The drafts and writes of the method's kind of loop.

    Raises: NotSupported for a kind that has no reference.
    """
    loop = LOOP_REFERENCES.get(ctx.capabilities.kind)
    if loop is None:
        raise NotSupported(
            f"the draft loop {ctx.capabilities.kind!r} has no reference; known: "
            f"{', '.join(sorted(LOOP_REFERENCES))}"
        )
    return _drafted(loop, before(case.inputs), ctx, case)


def trim_draft_head(before: Before, ctx: PassContext, case: Case) -> Values:
    """The loop once more, from what was before it: its head computes the columns of
    `ctx.draft_ids` alone.
    """
    values = before(case.inputs)
    num_calls = 0 if case.key.kind == "replay" else ctx.num_attention_layers
    theirs = dataclasses.replace(
        values,
        roles={n: value for n, value in values.roles.items() if not n.startswith(MADE_BY_LOOPS)},
        buffers={n: b for n, b in values.buffers.items() if not n.startswith(WRITTEN_BY_LOOPS)},
        calls=values.calls[:num_calls],
    )
    loop = LOOP_REFERENCES[ctx.capabilities.kind]
    assert ctx.draft_ids is not None
    return _drafted(loop, theirs, ctx, case, ctx.draft_ids.to(ctx.config.device))


def _drafted(
    loop: Loop, values: Values, ctx: PassContext, case: Case, kept_ids: Tensor | None = None
) -> Values:
    """The values that the step has before its draft loop, and those that the loop adds."""
    buffers = {
        name: case.inputs[name].clone() for name in ctx.buffers if name not in values.buffers
    }
    drafter = Drafts(ctx, case, buffers, values.roles, kept_ids)
    if ctx.drafts_now:
        drafts = _widened(ctx, loop(drafter, values))
        buffers |= drafter.kept_probs()
    else:
        drafts = _widened(ctx, values.roles["target"].new_empty((len(drafter.state_rows()), 0)))
        if LOOPS[ctx.capabilities.kind].needs_replay:
            keep_step(drafter.placed, values, buffers)
        if ctx.capabilities.kind == "block":
            write_context(drafter, values)
        if ctx.capabilities.kind == "direct" and "history_RL" in buffers:
            write_history(drafter, values)
    if ctx.capabilities.combines and case.key.kind != "replay":
        drafts = combined(drafter, values, drafts)
    made = {"drafts": drafts}
    if ctx.tells_evidence:
        made["evidence"] = evidence_of(drafts, drafter.confidences(len(drafts)))
    if drafter.parents is not None:
        made["parents"] = drafter.parents
    return dataclasses.replace(
        values,
        roles={**values.roles, **made},
        buffers={**values.buffers, **buffers},
        calls=(*values.calls, *drafter.calls),
        rounded=() if drafter.child_prob_RIV is None else ("child_prob_RIV",),
    )


def _widened(ctx: PassContext, drafts_BK: Tensor) -> Tensor:
    """As many columns as the largest K of the program has; PAD after the graph's own."""
    missing = ctx.config.num_row_tokens - 1 - drafts_BK.shape[1]
    pad = drafts_BK.new_full((drafts_BK.shape[0], missing), PAD)
    return torch.cat([drafts_BK, pad], 1)
