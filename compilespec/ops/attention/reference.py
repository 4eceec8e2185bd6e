"""The definition of `attention`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._tensors import wide_dtype


def attention_reference(
    query_BNTH: Tensor,
    key_BNTH: Tensor,
    value_BNTH: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
    chunk: int = 0,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend causally over the token dimension, without a cache.

    Args:
        query_BNTH: [B, N, T, H], any strides.
        key_BNTH: [B, Nkv, T, H]; query head n reads KV head n // (N / Nkv).
        value_BNTH: [B, Nkv, T, Hv].
        scale: factor on query times key.
        window: 0, or w > 0 to see only keys j with i - w < j <= i.
        softcap: 0, or c > 0 for tanh(score / c) * c, after scaling, before the mask.
        sinks_N: None, or one more logit per head that joins the softmax denominator only.
        chunk: 0, or c > 0 to see only keys j of the token's own chunk, j // c == i // c.
        mask: what the model was given, until tracing has read a window or a chunk from it; bool,
            true where a key is seen, or floating point, added to the scores.  It says of later keys
            too whether they are seen.
    Returns:
        [B, T, N, Hv], contiguous, dtype of query; softmax in float32 (float64 for float64).
    Source: transformers' eager_attention_forward; sinks as in gpt-oss.
    """
    wide = wide_dtype(query_BNTH.dtype)
    group = query_BNTH.shape[1] // key_BNTH.shape[1]
    key_BNTH = key_BNTH.to(wide).repeat_interleave(group, 1)
    value_BNTH = value_BNTH.to(wide).repeat_interleave(group, 1)
    score_BNTT = torch.matmul(query_BNTH.to(wide), key_BNTH.transpose(2, 3)) * scale
    if softcap > 0:
        score_BNTT = torch.tanh(score_BNTT / softcap) * softcap
    position_T = torch.arange(query_BNTH.shape[2], device=query_BNTH.device)
    visible_TT = position_T[None, :] <= position_T[:, None]
    if window > 0:
        visible_TT &= position_T[None, :] > position_T[:, None] - window
    if chunk > 0:
        visible_TT &= position_T[None, :] // chunk == position_T[:, None] // chunk
    if mask is not None and mask.dtype == torch.bool:
        visible_TT = mask
    elif mask is not None:
        visible_TT = mask > torch.finfo(mask.dtype).min / 2
        score_BNTT = score_BNTT + mask.to(wide)
    score_BNTT = score_BNTT.masked_fill(~visible_TT, float("-inf"))
    weight_BNTT = softmax_with_sinks(score_BNTT, sinks_N)
    out_BNTH = torch.matmul(weight_BNTT, value_BNTH)
    return out_BNTH.transpose(1, 2).to(query_BNTH.dtype).contiguous()


def softmax_with_sinks(score_BNTT: Tensor, sinks_N: Tensor | None) -> Tensor:
    """Softmax over J of [B, N, T, J]; a head's sink takes probability but contributes no value."""
    if sinks_N is None:
        return torch.softmax(score_BNTT, dim=-1)
    sink_BNT1 = sinks_N.to(score_BNTT.dtype).view(1, -1, 1, 1).expand(*score_BNTT.shape[:-1], 1)
    return torch.softmax(torch.cat([score_BNTT, sink_BNT1], dim=-1), dim=-1)[..., :-1]
