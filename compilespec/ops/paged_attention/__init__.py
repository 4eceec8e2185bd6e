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


paged_attention = define_op(
    paged_attention_reference,
    _paged_attention_fake,
    writes=("key_cache", "value_cache"),
    has_kernel=True,
    triton="paged_attention",
    tags=(torch.Tag.flexible_layout,),
    optional=("window", "softcap", "sinks_N"),
)
write_cache = define_op(
    write_cache_reference,
    lambda key, value, key_cache, value_cache, slot: None,
    writes=("key_cache", "value_cache"),
    has_kernel=True,
    triton="paged_attention",
)
