"""The definition of `paged_attention`, in plain torch, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._tensors import wide_dtype
from compilespec.ops.attention.reference import softmax_with_sinks


def paged_attention_reference(
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
    window: int = 0,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
    value_dim: int = 0,
    path_BSP: Tensor | None = None,
    first_BS: Tensor | None = None,
) -> Tensor:
    """Write every token's K and V to the cache, then let every token attend to its request's cache.

    Args:
        query_BNSH: [B, N, S, H], any strides; likewise key [B, Nkv, S, H] and value [B, Nkv, S,
            Hv].  With paths, keys and values may be of more tokens than the queries, J of them.
        key_cache: [num_blocks, block_size, Nkv, H], written in place; value_cache alike with Hv.
            Contiguous; on the CPU also head by head in memory (`HEADS_FIRST`).
        value_BNSH, value_cache: both None where a value is the first `value_dim` numbers of its
            key, as in attention over latents: there is one cache then, and Hv is `value_dim`.
        slot_BS: int32, flat cache index (block * block_size + offset) to write to; -1 writes
            nothing.  One for each key: [B, J] with paths.
        row_BS: int32, the token's row of the block table; -1 is a padded token: reads nothing,
            outputs zeros.
        position_BS: int32, the token sees cache positions 0..position (the last `window` of them
            when window > 0).
        block_table_RM: int32, block of positions m * block_size onwards; an entry -1 (or a position
            beyond the table) is never read, and its positions are invisible.
        scale, window, softcap, sinks_N: as in `attention_reference`.
        path_BSP: int32, the last tokens that each token sees, oldest first and itself last, by
            their index among this call's keys, 0..J-1; -1 after them.  n of them stand for the
            positions after position - n, whose keys are then not read from the cache.  So a node of
            a tree sees the root of the tree and what leads from there to itself, and computes what
            it would in a chain.  None: all keys are in the cache.
        first_BS: int32, the first position that each token sees in the cache, which then is seen up
            to position, for any window; the path is seen beside that, in any order.  So the
            rows of a block see what precedes the block, and each other.
    Returns:
        [B, S, N, Hv], contiguous, dtype of query.  All writes come before all reads.
    """
    batch, num_heads, num_tokens, _ = query_BNSH.shape
    write_cache_reference(key_BNSH, value_BNSH, key_cache, value_cache, slot_BS)
    values = key_cache[..., :value_dim] if value_cache is None else value_cache
    out_BSNH = query_BNSH.new_zeros((batch, num_tokens, num_heads, values.shape[3]))
    rows, positions = row_BS.tolist(), position_BS.tolist()
    for b, s in ((b, s) for b in range(batch) for s in range(num_tokens) if rows[b][s] >= 0):
        path_P = block_table_RM.new_empty(0) if path_BSP is None else path_BSP[b, s]
        path_P = path_P[path_P >= 0].long()
        last = positions[b][s] - len(path_P)
        first = max(0, positions[b][s] - window + 1) if window > 0 else 0
        if first_BS is not None:
            last = positions[b][s]
            first = min(max(0, int(first_BS[b, s])), last + 1)
        cell_J = visible_cells(block_table_RM[rows[b][s]], first, last, key_cache.shape[1])
        path_P = path_P[max(0, first - last - 1) :]
        key_JNH = torch.cat([key_cache.flatten(0, 1)[cell_J], key_BNSH[b, :, path_P].movedim(1, 0)])
        new = key_BNSH[..., :value_dim] if value_BNSH is None else value_BNSH
        value_JNH = torch.cat([values.flatten(0, 1)[cell_J], new[b, :, path_P].movedim(1, 0)])
        out_BSNH[b, s] = attend(query_BNSH[b, :, s], key_JNH, value_JNH, scale, softcap, sinks_N)
    return out_BSNH


def write_cache_reference(
    key_BNSH: Tensor,
    value_BNSH: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_BS: Tensor,
) -> None:
    """Write every token's K and V to its slot of the caches, in place; a slot of -1 writes nothing.

    Args: as in `paged_attention_reference`.
    """
    slot_T = slot_BS.reshape(-1)
    written_T = slot_T >= 0
    for cache, new_BNSH in ((key_cache, key_BNSH), (value_cache, value_BNSH)):
        if cache is None or new_BNSH is None:
            continue
        new_TNH = new_BNSH.transpose(1, 2).flatten(0, 1)
        cache.view(-1, *cache.shape[2:])[slot_T[written_T].long()] = new_TNH[written_T]


def visible_cells(table_M: Tensor, first: int, last: int, block_size: int) -> Tensor:
    """Flat cache indices of the keys at positions first..last, oldest first."""
    stop = min(last + 1, table_M.shape[0] * block_size)
    key_J = torch.arange(first, max(first, stop), device=table_M.device)
    block_J = table_M[key_J // block_size].long()
    return (block_J * block_size + key_J % block_size)[block_J >= 0]


def attend(
    query_NH: Tensor,
    key_JNH: Tensor,
    value_JNH: Tensor,
    scale: float,
    softcap: float,
    sinks_N: Tensor | None,
) -> Tensor:
    """One token against the keys that it sees: [N, Hv], zeros when there are none."""
    wide = wide_dtype(query_NH.dtype)
    group = query_NH.shape[0] // key_JNH.shape[1]
    key_JNH = key_JNH.to(wide).repeat_interleave(group, 1)
    value_JNH = value_JNH.to(wide).repeat_interleave(group, 1)
    score_NJ = torch.einsum("nh,jnh->nj", query_NH.to(wide), key_JNH) * scale
    if softcap > 0:
        score_NJ = torch.tanh(score_NJ / softcap) * softcap
    weight_NJ = softmax_with_sinks(score_NJ[None, :, None], sinks_N)[0, :, 0]
    return torch.einsum("nj,jnh->nh", weight_NJ, value_JNH).to(query_NH.dtype)
