"""roll_window in Triton: each program loads its columns of the window, then writes them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 256


def roll_window(
    ring_hidden_RKD: Tensor,
    ring_ids_RK: Tensor,
    index_B: Tensor,
    hidden_BSD: Tensor,
    ids_BS: Tensor,
    num_emitted_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `roll_window_reference`."""
    batch, num_kept, width = index_B.shape[0], ring_ids_RK.shape[1], ring_hidden_RKD.shape[2]
    hidden_BWD = ring_hidden_RKD.new_empty((batch, num_kept + 1, width))
    ids_BW = ring_ids_RK.new_empty((batch, num_kept + 1))
    if batch:
        roll_kernel[(batch, triton.cdiv(width, _COLUMNS))](
            ring_hidden_RKD, ring_ids_RK, index_B.contiguous(), hidden_BSD.contiguous(),
            ids_BS.contiguous(), num_emitted_B.contiguous(), hidden_BWD, ids_BW,
            KEPT=num_kept, WIDTH=width, BLOCK_W=triton.next_power_of_2(num_kept + 1),
            BLOCK_D=_COLUMNS,
        )  # fmt: skip
    return hidden_BWD, ids_BW


@triton.jit
def roll_kernel(
    ring_ptr, ring_ids_ptr, index_ptr, hidden_ptr, ids_ptr, num_emitted_ptr, window_ptr,
    window_ids_ptr,
    KEPT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + b)
    w = tl.arange(0, BLOCK_W)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = tl.load(num_emitted_ptr + b).to(tl.int32) - 1 + w
    is_old = (place < KEPT) & (w <= KEPT)
    is_new = (place >= KEPT) & (w <= KEPT)
    is_inside = (d < WIDTH)[None, :]
    old = ring_ptr + (row * KEPT + place)[:, None] * WIDTH + d[None, :]
    new = hidden_ptr + (b * (KEPT + 1) + place - KEPT)[:, None] * WIDTH + d[None, :]
    hidden_WD = tl.load(old, mask=is_old[:, None] & is_inside, other=0.0)
    hidden_WD = tl.where(
        is_old[:, None], hidden_WD, tl.load(new, mask=is_new[:, None] & is_inside, other=0.0)
    )
    ids_W = tl.load(ring_ids_ptr + row * KEPT + place, mask=is_old, other=0)
    fed_W = tl.load(ids_ptr + b * (KEPT + 1) + place - KEPT, mask=is_new, other=0)
    ids_W = tl.where(is_old, ids_W, fed_W)
    at = window_ptr + (b * (KEPT + 1) + w)[:, None] * WIDTH + d[None, :]
    tl.store(at, hidden_WD, mask=(w <= KEPT)[:, None] & is_inside)
    tl.debug_barrier()  # all reads of the ring are done: it may be written
    kept = ring_ptr + (row * KEPT + w - 1)[:, None] * WIDTH + d[None, :]
    tl.store(kept, hidden_WD, mask=((w > 0) & (w <= KEPT))[:, None] & is_inside)
    if tl.program_id(1) == 0:
        tl.store(window_ids_ptr + b * (KEPT + 1) + w, ids_W, mask=w <= KEPT)
        tl.store(ring_ids_ptr + row * KEPT + w - 1, ids_W, mask=(w > 0) & (w <= KEPT))
