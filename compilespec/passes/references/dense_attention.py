"""Stateless attention over each request's whole history, gathered from its cache blocks."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from compilespec.ops.attention.reference import softmax_with_sinks
from compilespec.passes.references.base import Attention, Tokens


def dense_attention(
    caches: MutableMapping[str, Tensor],
    owner: str,
    tokens: Tokens,
    block_table_RM: Tensor,
    ahead_T: Tensor | None = None,
    *,
    in_windows: bool = False,
) -> Attention:
    """Attention for a graph whose i-th marker is layer i of `owner`; writes K and V to `caches`.

    Without a cache of values they are the beginning of the keys.
    Args:
        ahead_T: how many later tokens each token sees; None: none.
        in_windows: true if they are seen in layers with a window alone.
    """
    none = torch.zeros_like(tokens.position.flatten())

    def attend(layer: int, args: tuple[Any, ...]) -> Tensor:
        query, key, value, *options = args
        key_cache = caches[f"cache.{owner}.{layer}.key"]
        value_cache = caches.get(f"cache.{owner}.{layer}.value", key_cache[..., : value.shape[3]])
        for cache, new_BNSH in ((key_cache, key), (value_cache, value)):
            new_TNH = new_BNSH.transpose(1, 2).flatten(0, 1)
            for token, slot in enumerate(tokens.slot.flatten().tolist()):
                if slot >= 0:
                    cache.flatten(0, 1)[slot] = new_TNH[token]
        ahead = none if ahead_T is None or (in_windows and not options[1]) else ahead_T
        return _attend_rows(query, key_cache, value_cache, tokens, ahead, block_table_RM, *options)

    return attend


def _attend_rows(
    query_BNSH: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tokens: Tokens,
    ahead_T: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_N: Tensor | None,
    chunk: int = 0,
    mask: Tensor | None = None,
) -> Tensor:
    """[B, S, N, Hv], zeros for tokens without a row.  `mask`: [1 or B, 1 or N, S, L]."""
    query_TNH = query_BNSH.transpose(1, 2).flatten(0, 1)
    out_TNH = query_TNH.new_zeros((*query_TNH.shape[:2], value_cache.shape[-1]))
    row_T, position_T = tokens.row.flatten(), tokens.position.flatten()
    wide = torch.float64 if query_BNSH.dtype == torch.float64 else torch.float32
    for row in sorted({row for row in row_T.tolist() if row >= 0}):
        mine_T = (row_T == row).nonzero().flatten()
        position_Q, ahead_Q = position_T[mine_T].long(), ahead_T[mine_T].long()
        length = int((position_Q + ahead_Q).max()) + 1
        key_NJH, value_NJH = (
            _history(cache, block_table_RM[row], length, query_TNH.shape[1]).to(wide)
            for cache in (key_cache, value_cache)
        )
        score_NQJ = query_TNH[mine_T].to(wide).transpose(0, 1) @ key_NJH.transpose(1, 2) * scale
        if softcap > 0:
            score_NQJ = torch.tanh(score_NQJ / softcap) * softcap
        hidden_QJ = _hidden(position_Q, ahead_Q, length, window, chunk)
        if mask is not None:
            own_NQJ = _rows_of_mask(mask, tokens, mine_T)[:, :, :length]
            score_NQJ = score_NQJ + own_NQJ.to(wide)
            hidden_QJ = hidden_QJ | (own_NQJ < torch.finfo(own_NQJ.dtype).min / 2)
        score_NQJ = score_NQJ.masked_fill(hidden_QJ, float("-inf"))
        weight_NQJ = softmax_with_sinks(score_NQJ.unsqueeze(0), sinks_N)[0]
        weight_NQJ = weight_NQJ.masked_fill(hidden_QJ, 0)  # where a token sees nothing at all
        out_TNH[mine_T] = (weight_NQJ @ value_NJH).transpose(0, 1).to(out_TNH.dtype)
    return out_TNH.view(*tokens.row.shape, *out_TNH.shape[1:])


def _history(cache: Tensor, block_M: Tensor, length: int, num_heads: int) -> Tensor:
    """The first `length` cells of a request, [N, J, H], for each head of the queries."""
    blocks = block_M[: -(-length // cache.shape[1])].long()
    cells_JNH = cache[blocks].flatten(0, 1)[:length]
    return cells_JNH.repeat_interleave(num_heads // cache.shape[2], 1).transpose(0, 1)


def _rows_of_mask(mask: Tensor, tokens: Tokens, mine_T: Tensor) -> Tensor:
    """What a mask adds to the scores of some tokens, [1 or N, Q, L]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))
    batch, num_rows = tokens.row.shape
    every = mask.expand(batch, -1, num_rows, -1).transpose(1, 2).flatten(0, 1)
    return every[mine_T].transpose(0, 1)


def _hidden(position_Q: Tensor, ahead_Q: Tensor, length: int, window: int, chunk: int) -> Tensor:
    """Which of the first `length` positions each query does not see: bool [Q, J]."""
    age_QJ = position_Q[:, None] - torch.arange(length, device=position_Q.device)
    hidden_QJ = age_QJ < -ahead_Q[:, None]
    if window > 0:
        hidden_QJ |= age_QJ >= window
    if chunk > 0:
        hidden_QJ |= age_QJ > (position_Q % chunk)[:, None]
    return hidden_QJ
