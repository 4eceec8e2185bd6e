"""Turns recurrence and convolution markers into operators on the states of the requests."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops import LOOPS
from compilespec.passes.splice.recurrent_state import ABSORBED, StatePlaces, keep_states
from compilespec.program import BufferSpec, ProgramConfig, markers


def insert_recurrent_state(step: Splice) -> int:
    """Marker -> `compilespec::cached_recurrence` or `cached_conv` with the layer's state rows.

    A decode step commits its first token, which the step before emitted; its drafts may be
    rejected.  A prefill call commits all its tokens but those that the next chunk runs again.
    Makes the roles `absorbed` and `commits`, and counts the tokens that the states hold in
    `absorbed_R`.  Numerics: rounding (transformers divides a sequence into chunks).  Torch IR.
    """
    roles = step.roles
    roles.absorbed, roles.commits = _decode(step) if step.is_decode else _prefill(step)
    places = StatePlaces(
        row=roles.row, position=roles.position, absorbed=roles.absorbed, commits=roles.commits
    )
    return keep_states(step, "target", places)


def _decode(step: Splice) -> tuple[Tensor, Tensor]:
    roles, counts = step.roles, step.buffer(absorbed_tokens(step.config))
    with step.before(_first_marker(step)):
        made = step.call(_decode_places, counts, roles.row_index, roles.position)
    step.call(_count_first, counts, roles.row_index, roles.start)
    return made


def _decode_places(
    absorbed_R: Tensor, index_B: Tensor, position_BS: Tensor, *, num_verify_tokens: int
) -> tuple[Tensor, Tensor]:
    place_S = arange_like(position_BS, num_verify_tokens)
    absorbed_BS = absorbed_R[index_B].unsqueeze(1) + torch.zeros_like(position_BS)
    return absorbed_BS, (place_S < 1).unsqueeze(0) & (position_BS >= 0)


def _count_first(
    absorbed_R: Tensor, index_B: Tensor, start_B: Tensor, *, max_seq_len: int
) -> Tensor:
    return absorbed_R.index_put_((index_B,), (start_B + 1).clamp(max=max_seq_len))


def _prefill(step: Splice) -> tuple[Tensor, Tensor]:
    roles, loop = step.roles, LOOPS[step.ctx.capabilities.kind]
    counts, owner = step.buffer(absorbed_tokens(step.config)), step.batch("owner_T")
    with step.before(_first_marker(step)):
        absorbed, commits, index, end = step.call(
            _prefill_places,
            counts,
            roles.row,
            roles.position,
            owner,
            roles.live,
            roles.start,
            num_repeated=loop.reach(step.config.num_row_tokens - 1).num_repeated_tokens,
        )
    counts.index_put_((index,), end)
    return absorbed, commits


def _prefill_places(
    absorbed_R: Tensor,
    row_1T: Tensor,
    position_1T: Tensor,
    owner_T: Tensor,
    live_R: Tensor,
    start_R: Tensor,
    *,
    spare_row: int,
    num_repeated: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the last call of a prompt ends, the next one begins: `num_repeated` tokens earlier,
    unless the prompt ended, too.
    """
    index_1T = torch.where(row_1T >= 0, row_1T, spare_row).long()
    end_R = torch.where(live_R, start_R, (start_R - num_repeated).clamp(min=0))
    end_1T = end_R[owner_T.long()].unsqueeze(0)
    return absorbed_R[index_1T], position_1T < end_1T, index_1T.squeeze(0), end_1T.squeeze(0)


def _first_marker(step: Splice) -> fx.Node:
    return markers(step.gm, "recurrence", "causal_conv")[0]


def absorbed_tokens(config: ProgramConfig) -> BufferSpec:
    """Tokens of each row's request that the states of the target's recurrent layers hold."""
    shape = (config.num_rows,)
    return BufferSpec(name=ABSORBED, kind="state", shape=shape, dtype=torch.int32)
