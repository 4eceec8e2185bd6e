"""Where tokens belong: their positions, state rows and cache slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice


class Places(NamedTuple):
    """What attention must know of the tokens of a call."""

    slot: Tensor  # int32 [B, S] or [1, T]: flat cache index, -1: writes nothing
    row: Tensor  # int32, the same shape: state row, -1: reads nothing
    position: Tensor  # int32, the same shape
    table: Tensor  # int32 [R, M]: block table


def step_places(step: Splice) -> Places:
    """Those of the step's own tokens."""
    roles = step.roles
    return Places(roles.slot, roles.row, roles.position, roles.block_table_RM)


def live_row(step: Splice) -> Tensor:
    """The state row of each request, -1 if nothing may be written; int32 [B]."""
    roles = step.roles
    return torch.where(roles.live, roles.row_index, -1).to(torch.int32)


def place(
    wanted: Tensor,
    row: Tensor,
    index: Tensor,
    live: Tensor,
    block_table_RM: Tensor,
    *,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention metadata (position, row, slot) of tokens at the `wanted` positions, redirected if
    those are out of range.

    Args:
        wanted: int32 positions, [B, S]; row: state rows, int32, -1 = padded; index: the same with
        the spare row for padded ones, int64; live: bool; all broadcastable to `wanted`.
    """
    inside = live & (wanted < max_seq_len)
    position = torch.where(inside, wanted, 0)
    block = block_table_RM[index, (position // block_size).long()]
    slot = torch.where(inside & (block >= 0), block * block_size + position % block_size, -1)
    return position, torch.where(inside, row, -1), slot
