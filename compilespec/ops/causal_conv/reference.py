"""The definition of `causal_conv` and `cached_conv`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._tensors import wide_dtype
from compilespec.ops.recurrence.reference import segments


def causal_conv_reference(x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """A causal convolution over the tokens, each channel by itself: token t reads t-W+1 .. t.

    Args:
        x_BTC: [B, T, C], any strides; before the first token there are zeros.
        weight_CW: [C, W], the newest token's weight last.
        bias_C: [C], or None.
    Returns:
        [B, T, C], contiguous, dtype of x; sums are float32, for float64 float64.
    """
    padded_BTC = torch.nn.functional.pad(x_BTC, (0, 0, weight_CW.shape[1] - 1, 0))
    return _slide(padded_BTC, weight_CW, bias_C)


def cached_conv_reference(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    recent_RPC: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
) -> Tensor:
    """`causal_conv` over the requests' tokens, the earlier ones from a ring of recent tokens.

    Rejected drafts need no care: their places in the ring are written again by the next step, which
    reads none of them.

    Args:
        x_BSC, weight_CW, bias_C: as in `causal_conv_reference`.
        recent_RPC: [rows, P, C], dtype of x, contiguous, written in place; position p is in column
            p % P.
        row_BS: int32, the token's state row; -1 is a padded token: it writes nothing and its output
            is zero.  A request's tokens stand together, in the order of their positions.
        position_BS: int32; before position 0 there are zeros.
    Returns:
        [B, S, C], contiguous, dtype of x; a token's bits depend on the W tokens alone.
    """
    x_TC, position_T = x_BSC.flatten(0, 1), position_BS.flatten().tolist()
    out_TC = torch.zeros_like(x_TC, memory_format=torch.contiguous_format)
    num_before, num_kept = weight_CW.shape[1] - 1, recent_RPC.shape[1]
    for row, tokens in segments(row_BS):
        first = position_T[tokens[0]]
        before = [
            recent_RPC[row, position % num_kept] if position >= 0 else torch.zeros_like(x_TC[0])
            for position in range(first - num_before, first)
        ]
        mine_TC = torch.stack([*before, *(x_TC[token] for token in tokens)])
        out_TC[tokens] = _slide(mine_TC[None], weight_CW, bias_C)[0]
        for token in tokens[-num_kept:]:
            recent_RPC[row, position_T[token] % num_kept] = x_TC[token]
    return out_TC.view(x_BSC.shape)


def _slide(padded_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """The oldest token first, then the bias."""
    wide, width = wide_dtype(padded_BTC.dtype), weight_CW.shape[1]
    num_tokens = padded_BTC.shape[1] - width + 1
    total = torch.zeros_like(padded_BTC[:, :num_tokens], dtype=wide)
    for place in range(width):
        total += padded_BTC[:, place : place + num_tokens].to(wide) * weight_CW[:, place].to(wide)
    if bias_C is not None:
        total += bias_C.to(wide)
    return total.to(padded_BTC.dtype).contiguous()
