"""Drafting on the target's caches: one query per draft, all at the same position."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.calls import newest_token, next_position, propose, run
from compilespec.passes.splice.places import place, placed_by
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
    roles = step.roles
    parts = (roles.start, roles.num_emitted) if step.is_decode else (roles.start,)
    places, newest = placed_by(step, place_queries, parts), next_position(step)
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
    roles.drafts = torch.stack(drafts, 1)
    return len(drafts)


def place_queries(
    newest: tuple[Tensor, ...],
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, row, position), [B, 1]: a query has the newest key's position, the sum of `newest`
    less one, and writes nothing.
    """
    wanted_B1 = cast(Tensor, sum(newest) - 1).unsqueeze(1)
    live_B1, index_B1 = live_B.unsqueeze(1), index_B.unsqueeze(1)
    row_B1 = torch.where(live_B1, index_B1, -1).to(torch.int32)
    position, row, _ = place(
        wanted_B1,
        row_B1,
        index_B1,
        live_B1,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return torch.full_like(position, -1), row, position
