"""Where tokens belong: their positions, state rows and cache slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice


class Places(NamedTuple):
    """The places of the tokens of a call, for attention."""

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


def requests(step: Splice) -> tuple[Tensor, Tensor, Tensor]:
    """What the places of a request's tokens follow from: its state row, whether that may be
    written, and the block table.
    """
    return step.roles.row_index, step.roles.live, step.roles.block_table_RM


def placed_by(step: Splice, function: Callable[..., Any], *known: Any, **sizes: Any) -> Places:
    """Places that a tensor function of `known` and `requests` gives: (slot, row, position)."""
    slot, row, position = step.call(function, *known, *requests(step), **sizes)
    return Places(slot, row, position, step.roles.block_table_RM)


def unwritten(step: Splice, wanted_BS: Tensor) -> Places:
    """Places of rows at the `wanted` positions of each request that stay in no cache."""
    return placed_by(step, place_unwritten, wanted_BS)


def place_unwritten(
    wanted_BS: Tensor,
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, row and position of these rows, [B, S]; all slots are -1."""
    row_B = torch.where(live_B, index_B, -1).to(torch.int32)
    position, row, _ = place_rows(
        wanted_BS,
        row_B,
        index_B,
        live_B,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return torch.full_like(position, -1), row, position


def place_rows(
    wanted_BS: Tensor,
    row_B: Tensor,
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`place` of S tokens of each request."""
    rows = (row_B.unsqueeze(1), index_B.unsqueeze(1), live_B.unsqueeze(1))
    return place(wanted_BS, *rows, block_table_RM, max_seq_len=max_seq_len, block_size=block_size)


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
