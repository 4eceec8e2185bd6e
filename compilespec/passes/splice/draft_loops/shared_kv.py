"""Drafting on the target's caches: one query per draft, all at the same position."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.calls import newest_token, next_position, propose, run
from compilespec.passes.splice.places import unwritten
from compilespec.passes.splice.rows import take_newest


def shared_kv(step: Splice) -> int:
    """K single-token passes at the position of the newest key, over caches that the target wrote.

    The first takes the bonus token and the target's hidden state one position back; each later pass
    takes the draft and the hidden state of the pass before.  All share one set of places, whose
    slots are -1: the drafter writes nothing.  Makes the role `drafts` ([B, K], int32).  Torch IR.
    Source: requirements A2, S9.
    """
    aux = torch.cat(step.taps(), -1)
    token = newest_token(step)
    (hidden,) = take_newest(step, aux)
    (hidden,) = step.fragment("combine", aux=hidden)
    newest = next_position(step)
    places = unwritten(step, (newest - 1).unsqueeze(1))
    drafts: list[Tensor] = []
    for number in range(1, step.config.num_draft_tokens + 1):
        head, hidden = run(
            step,
            "forward",
            places,
            caches="target",
            layers=step.ctx.drafter.kv_layers,
            input_ids=token.clamp(min=0).unsqueeze(1),
            hidden=hidden,
        )
        token = propose(step, head.squeeze(1), newest, number)
        drafts.append(token)
    step.roles.drafts = torch.stack(drafts, 1)
    return len(drafts)
