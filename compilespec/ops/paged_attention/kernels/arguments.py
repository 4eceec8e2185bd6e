"""The arguments of the kernels, grouped."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from compilespec.ops._tensors import dense_rows, outer_strides


class Heads(NamedTuple):
    """Queries, keys or values [B, N, S, H] of a step, the last dimension dense."""

    data: Any
    b: Any  # strides
    n: Any
    s: Any


class Cache(NamedTuple):
    """Keys and values by block, and the block table of each state row."""

    key: Any  # [blocks, block size, KV heads, H]
    value: Any
    table: Any  # int32 [R, M]


class KernelPlaces(NamedTuple):
    """State row and position of each token: int32 [B, S], -1 for none."""

    row: Any
    position: Any


class Path(NamedTuple):
    """The keys and values of a call, and the ones that each of its tokens sees instead of the
    cache's last ones.
    """

    key: Any  # Heads
    value: Any  # Heads; those of the keys where a value is part of its key
    index: Any  # int32 [B, S, P]
    num_keys: Any  # of a batch row
    first: Any  # int32 [B, S]: the first position that each token sees in the cache

    @classmethod
    def of(
        cls, own: tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None, *unread: Tensor
    ) -> Path:
        """`unread`: queries and integers to name where there are no paths."""
        query, index = unread
        key, value, path, first = own or (query, None, index, None)
        first = index if first is None else first
        key = dense_rows(key)
        value = key if value is None else dense_rows(value)
        heads = [Heads(x, *outer_strides(x)) for x in (key, value)]
        return cls(*heads, path.contiguous(), key.shape[2], first.contiguous())

    @property
    def size(self) -> int:
        """P; 0 for tokens without paths."""
        return self.index.shape[2] if self.index.dim() == 3 else 0


class SegmentResults(NamedTuple):
    """The results of a context's segments: weighted values, highest score, sum of weights."""

    value: Any
    top: Any
    sum: Any
