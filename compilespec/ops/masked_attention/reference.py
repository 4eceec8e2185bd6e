"""Attention under a mask that a model computes from pairs of tokens, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._tensors import wide_dtype
from compilespec.ops.attention.reference import softmax_with_sinks

MOST_SINGLE_ROWS = 16  # of a call; more of them are a prompt's


def cached_reference(x: Tensor, dim: int) -> Tensor:
    """The marker for what earlier tokens of a request had at this place, and these after them.

    Args:
        x: [B, ..], with the tokens in dimension `dim`.
    Returns: without a cache the tokens' own values: a copy.
    """
    return x.clone(memory_format=torch.contiguous_format)


def all_positions_reference(position_ids: Tensor) -> Tensor:
    """The marker for the positions of all keys: int64 [T] of position_ids [B, T]."""
    return torch.arange(position_ids.shape[1], device=position_ids.device)


def cached_keys_reference(
    x_BSE: Tensor, cache: Tensor, slot_BS: Tensor, row_BS: Tensor, block_table_RM: Tensor
) -> Tensor:
    """Write the tokens' entries, then read all entries of each request.

    Args:
        x_BSE: [B, S, E]; the tokens of an entry of the batch are of one request.
        cache: [num_blocks, block_size, 1, E], written in place.
        slot_BS: int32, flat cache index; -1 writes nothing.
        row_BS: int32, row of the block table, the same for the live tokens of a request; -1: none.
        block_table_RM: int32, block of positions m * block_size onwards, -1 if there is none.
    Returns:
        [B, M * block_size, E] by position; what was not written is arbitrary, but never NaN, which
        a choice of the best keys would prefer to all others.
    """
    torch.ops.compilespec.write_cache(x_BSE.unsqueeze(1), None, cache, None, slot_BS)
    all_BLE = cache[_blocks(row_BS, block_table_RM)].flatten(1, 3)
    return all_BLE.masked_fill(all_BLE.isnan(), 0)


def masked_attention_reference(
    query_BNSH: Tensor,
    key_BNSH: Tensor,
    value_BNSH: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_BS: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
    block_table_RM: Tensor,
    scale: float,
    softcap: float,
    sinks_N: Tensor | None,
    value_dim: int,
    mask_BNSL: Tensor,
) -> Tensor:
    """Write every token's K and V, then let every token attend as its row of the mask says.

    Args:
        as in `paged_attention_reference`, but that the tokens of an entry of the batch are of one
        request, as in `cached_keys_reference`.
        position_BS: int32, the last position that a token sees.
        mask_BNSL: [1 or B, 1 or N, S, M * block_size]; bool, true where a key up to there is seen,
            or floating point, added to the scores after their soft cap.
    Returns:
        [B, S, N, Hv], contiguous, dtype of query; zeros for tokens without a row.
    """
    torch.ops.compilespec.write_cache(key_BNSH, value_BNSH, key_cache, value_cache, slot_BS)
    wide = wide_dtype(query_BNSH.dtype)
    block_BM = _blocks(row_BS, block_table_RM)
    values = key_cache[..., :value_dim] if value_cache is None else value_cache
    group = query_BNSH.shape[1] // key_cache.shape[2]
    key_BNLH, value_BNLH = (
        x[block_BM].flatten(1, 2).transpose(1, 2).to(wide).repeat_interleave(group, 1)
        for x in (key_cache, values)
    )
    score_BNSL = _products(query_BNSH.to(wide), key_BNLH.transpose(2, 3)) * scale
    if softcap > 0:
        score_BNSL = torch.tanh(score_BNSL / softcap) * softcap
    place_L = torch.arange(mask_BNSL.shape[-1], device=mask_BNSL.device)
    seen_BNSL = (place_L <= position_BS.unsqueeze(-1)).unsqueeze(1)
    if mask_BNSL.dtype == torch.bool:
        seen_BNSL = seen_BNSL & mask_BNSL
    else:
        score_BNSL = score_BNSL + mask_BNSL.to(wide)
        seen_BNSL = seen_BNSL & (mask_BNSL > torch.finfo(mask_BNSL.dtype).min / 2)
    score_BNSL = score_BNSL.masked_fill(~seen_BNSL, float("-inf"))
    weight_BNSL = softmax_with_sinks(score_BNSL, sinks_N).masked_fill(~seen_BNSL, 0)
    # What was never written may be anything, NaN too.
    value_BNLH = value_BNLH.nan_to_num(0.0, 0.0, 0.0)
    out_BSNH = _products(weight_BNSL, value_BNLH).transpose(1, 2)
    is_live = (row_BS >= 0)[:, :, None, None]
    return torch.where(is_live, out_BSNH, 0).to(query_BNSH.dtype).contiguous()


def _blocks(row_BS: Tensor, block_table_RM: Tensor) -> Tensor:
    """The blocks of each request, int64 [B, M]; arbitrary where none of its tokens has a row."""
    row_B = row_BS.amax(1).clamp(min=0).long()
    return block_table_RM[row_B].clamp(min=0).long()


def _products(x_BNSA: Tensor, y_BNAC: Tensor) -> Tensor:
    """x @ y; the few rows of a verify step one by one: each has the bits of a plain step."""
    num_rows = x_BNSA.shape[2]
    if num_rows > MOST_SINGLE_ROWS:
        return x_BNSA @ y_BNAC
    return torch.cat([x_BNSA[:, :, s : s + 1] @ y_BNAC for s in range(num_rows)], 2)
