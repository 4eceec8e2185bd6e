"""The definition of `roll_window`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def roll_window_reference(
    ring_hidden_RKD: Tensor,
    ring_ids_RK: Tensor,
    index_B: Tensor,
    hidden_BSD: Tensor,
    ids_BS: Tensor,
    num_emitted_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Pairs cat[n-1 : n+K] of the ring's K and the step's S; the last K of them stay in the ring.

    Args:
        ring_hidden_RKD, ring_ids_RK (int32): rows of the requests, written in place.
        index_B: int64, each request's row; if requests share a row (padded ones do), any of their
            pairs may end up there.
        hidden_BSD, ids_BS (int32): S = K + 1 pairs; num_emitted_B: int32, n in 1..S.
    Returns:
        [B, K+1, D] and int32 [B, K+1].
    """
    window = ring_ids_RK.shape[1] + 1
    hidden = torch.cat([ring_hidden_RKD[index_B], hidden_BSD], 1)
    ids = torch.cat([ring_ids_RK[index_B], ids_BS], 1)
    step_W = torch.arange(window, device=ids.device)
    place_BW = (num_emitted_B.long() - 1).unsqueeze(1) + step_W
    place_BWD = place_BW.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    hidden_BWD, ids_BW = hidden.gather(1, place_BWD), ids.gather(1, place_BW)
    ring_hidden_RKD.index_put_((index_B,), hidden_BWD[:, 1:])
    ring_ids_RK.index_put_((index_B,), ids_BW[:, 1:])
    return hidden_BWD, ids_BW
