"""Paged attention for decode rows and packed prefill: write K/V to the paged cache, then attend.

On the CPU (`kernel.cpp`) a token's output is bitwise the same for any batch, row count or packing:
the context is cut at fixed absolute positions and combined in a fixed order.  On a GPU
(`kernel.py`) the cuts depend on the longest context of a tile and on the number of tiles, so that
rounding may differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.paged_attention.reference import (
    paged_attention_reference,
    write_cache_reference,
)

__all__ = ["paged_attention", "paged_attention_reference", "write_cache", "write_cache_reference"]


def paged_attention(
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
    """Write K/V to the cache in place and attend from it; see `paged_attention_reference`."""
    return _PAGED_ATTENTION(
        query_BNSH,
        key_BNSH,
        value_BNSH,
        key_cache,
        value_cache,
        slot_BS,
        row_BS,
        position_BS,
        block_table_RM,
        scale,
        window,
        softcap,
        sinks_N,
        value_dim,
        path_BSP,
        first_BS,
    )


def write_cache(
    key_BNSH: Tensor,
    value_BNSH: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_BS: Tensor,
) -> None:
    """Write K/V to the cache in place and no more; see `write_cache_reference`."""
    _WRITE_CACHE(key_BNSH, value_BNSH, key_cache, value_cache, slot_BS)


def _paged_attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot: Tensor,
    row: Tensor,
    position: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    value_dim: int = 0,
    path: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    batch, num_heads, num_tokens, _ = query.shape
    width = value_dim if value is None else value.shape[3]
    return query.new_empty((batch, num_tokens, num_heads, width))


_PAGED_ATTENTION = define_op(
    "paged_attention(Tensor query, Tensor key, Tensor? value, Tensor(a!) key_cache, "
    "Tensor(b!)? value_cache, Tensor slot, Tensor row, Tensor position, Tensor block_table, "
    "float scale, int window, float softcap, Tensor? sinks, int value_dim=0, Tensor? path=None, "
    "Tensor? first=None) -> Tensor",
    paged_attention_reference,
    _paged_attention_fake,
    has_kernel=True,
    triton="paged_attention",
    tags=(torch.Tag.flexible_layout,),
)
_WRITE_CACHE = define_op(
    "write_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, Tensor(b!)? value_cache, "
    "Tensor slot) -> ()",
    write_cache_reference,
    lambda key, value, key_cache, value_cache, slot: None,
    has_kernel=True,
    triton="paged_attention",
)
