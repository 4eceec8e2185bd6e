"""Attention under masks that a model computes, and the markers that tracing emits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.masked_attention.reference import (
    all_positions_reference,
    cached_keys_reference,
    cached_reference,
    masked_attention_reference,
)

__all__ = ["all_positions", "cached", "cached_keys", "masked_attention"]


def _cached_fake(x: Tensor, dim: int) -> Tensor:
    return x.new_empty(x.shape)


def _all_positions_fake(position_ids: Tensor) -> Tensor:
    return position_ids.new_empty((position_ids.shape[1],), dtype=torch.int64)


def _cached_keys_fake(
    x_BSE: Tensor, cache: Tensor, slot_BS: Tensor, row_BS: Tensor, block_table_RM: Tensor
) -> Tensor:
    length = block_table_RM.shape[1] * cache.shape[1]
    return x_BSE.new_empty((x_BSE.shape[0], length, x_BSE.shape[2]))


def _masked_attention_fake(
    query: Tensor, key: Tensor, value: Tensor | None, key_cache: Tensor,
    value_cache: Tensor | None, *others: Any,
) -> Tensor:  # fmt: skip
    *_, value_dim, _mask = others
    batch, num_heads, num_tokens, _ = query.shape
    width = value_dim if value_cache is None else value_cache.shape[3]
    return query.new_empty((batch, num_tokens, num_heads, width))


cached = define_op(cached_reference, _cached_fake, has_kernel=False)
all_positions = define_op(all_positions_reference, _all_positions_fake, has_kernel=False)
cached_keys = define_op(
    cached_keys_reference, _cached_keys_fake, writes=("cache",), has_kernel=False
)
masked_attention = define_op(
    masked_attention_reference,
    _masked_attention_fake,
    writes=("key_cache", "value_cache"),
    has_kernel=False,
)
