"""Paged attention in Triton: write K and V, attend by tiles of rows, merge the splits.

A tile is a few consecutive tokens of one batch row, times the query heads of one KV head, so that K
and V are read once for all of them.  Without a value cache a value is the beginning of its key
(latents): it is loaded once, for the scores and for the mixing, and the many heads that share it
may take several tiles.  If few tiles would leave the GPU idle, what a tile sees is cut into equal
segments, and a second kernel merges the parts in order.  How many depends on shapes only, how long
they are on the device's positions: a short context in a table for a long one is cut as finely.
Grids depend on shapes only, nothing is read back to the host: safe in a CUDA graph.

Of a token with a path the keys at its last positions are the call's own: the program of the last
segment goes over those, with a mask, after the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops._tensors import dense_rows, outer_strides, wide_dtype
from compilespec.ops.paged_attention.choice import why_not_flash
from compilespec.ops.paged_attention.form import form_of
from compilespec.ops.paged_attention.kernels.arguments import (
    Cache,
    Heads,
    KernelPlaces,
    Path,
    SegmentResults,
)
from compilespec.ops.paged_attention.kernels.attend import (
    attend_kernel,
    merge_kernel,
    write_kernel,
)

ENOUGH_PROGRAMS = 512  # at most this many, where contexts are split; two to four a multiprocessor
ENOUGH_LARGE = 128  # of large tiles: one fills a multiprocessor's registers
MAX_SEGMENTS = 64
MIN_SEGMENT = 128  # keys; a multiple of every BLOCK_N
_COPIED = 1024  # elements that one program of `write_kernel` copies


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
    window: int,
    softcap: float,
    sinks_N: Tensor | None,
    value_dim: int = 0,
    path_BSP: Tensor | None = None,
    first_BS: Tensor | None = None,
) -> Tensor:
    """See `paged_attention_reference`; a slot, row or block outside its tensor counts as -1."""
    write_cache(key_BNSH, value_BNSH, key_cache, value_cache, slot_BS)
    form = form_of(
        key_cache, value_cache, window, softcap, has_sinks=sinks_N is not None,
        value_dim=value_dim, has_paths=path_BSP is not None,
    )  # fmt: skip
    if value_cache is not None and not why_not_flash(form, key_cache.device):
        from compilespec.ops.paged_attention import flash

        return flash.attend(
            query_BNSH, key_cache, value_cache, row_BS, position_BS, block_table_RM, scale, window
        )
    own = None if path_BSP is None else (key_BNSH, value_BNSH, path_BSP, first_BS)
    return attend(
        query_BNSH, key_cache, value_cache, row_BS, position_BS, block_table_RM, scale, window,
        softcap, sinks_N, value_dim, own,
    )  # fmt: skip


def write_cache(
    key_BNSH: Tensor,
    value_BNSH: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_BS: Tensor,
) -> None:
    """Copy each token's K and V to its slot; a slot of -1 writes nothing."""
    for cache in (key_cache, value_cache):
        if cache is not None and not cache.is_contiguous():
            raise ValueError(f"Triton's kernels need contiguous caches, got {cache.stride()}")
    batch, num_kv_heads, num_tokens, head_dim = key_BNSH.shape
    if value_BNSH is None or value_cache is None:
        value_BNSH, value_cache, value_dim = key_BNSH, key_cache, 0
    else:
        value_dim = value_BNSH.shape[3]
    if batch * num_tokens == 0:
        return
    key_BNSH, value_BNSH = dense_rows(key_BNSH), dense_rows(value_BNSH)
    chunks = triton.cdiv(num_kv_heads * max(head_dim, value_dim), _COPIED)
    write_kernel[(batch * num_tokens, chunks)](
        Heads(key_BNSH, *outer_strides(key_BNSH)), Heads(value_BNSH, *outer_strides(value_BNSH)),
        key_cache, value_cache, slot_BS.contiguous(), num_tokens,
        key_cache.shape[0] * key_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK=_COPIED,
    )  # fmt: skip


def attend(
    query_BNSH: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    row_BS: Tensor,
    position_BS: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_N: Tensor | None,
    value_dim: int = 0,
    own: tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Attend to the cache and, where tokens have paths, to `own`, the keys, the values, those paths
    and the first positions: [B, S, N, Hv].
    """
    batch, num_heads, num_tokens, head_dim = query_BNSH.shape
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    value_dim = value_dim if value_cache is None else value_cache.shape[3]
    first_key = value_dim if value_cache is None else 0  # what a score reads beside the value
    table_blocks = block_table_RM.shape[1]
    out = query_BNSH.new_empty((batch, num_tokens, num_heads, value_dim))
    if batch * num_tokens == 0:
        return out
    wide = wide_dtype(query_BNSH.dtype)
    parts_of_group = split_group(num_heads // num_kv_heads, value_dim)
    num_groups = num_kv_heads * parts_of_group
    group = num_heads // num_groups
    tile = choose_tile(num_tokens * group, group, max(head_dim, value_dim), query_BNSH.dtype)
    num_tiles = batch * triton.cdiv(num_tokens, tile.num_tokens)
    most_keys = table_blocks * block_size
    if window > 0:
        most_keys = min(most_keys, window + num_tokens)
    num_segments = choose_segments(num_tiles * num_groups, most_keys, is_large=tile.is_large)
    is_split = num_segments > 1
    parts = SegmentResults(out, out, out)
    if is_split:
        shape = (batch * num_tokens, num_heads, num_segments)
        parts = SegmentResults(*(out.new_empty((*shape, n), dtype=wide) for n in (value_dim, 1, 1)))
    query_BNSH = dense_rows(query_BNSH)
    places = KernelPlaces(row_BS.contiguous(), position_BS.contiguous())
    sinks = query_BNSH if sinks_N is None else sinks_N.contiguous()
    path = Path.of(own, query_BNSH, places.row)
    shared = {
        "HAS_SINKS": sinks_N is not None, "VALUE_DIM": value_dim,
        "BLOCK_V": triton.next_power_of_2(value_dim),
    }  # fmt: skip
    values = key_cache if value_cache is None else value_cache
    attend_kernel[(num_tiles, num_groups, num_segments)](
        Heads(query_BNSH, *outer_strides(query_BNSH)),
        Cache(key_cache, values, block_table_RM.contiguous()), places, path, sinks, out, parts,
        num_tokens, block_table_RM.shape[0], table_blocks, num_blocks,
        NUM_GROUPS=num_groups, GROUP_PARTS=parts_of_group, GROUP=group, HEAD_DIM=head_dim,
        FIRST_KEY=first_key, BLOCK_SIZE=block_size, SCALE=scale, SOFTCAP=softcap, WINDOW=window,
        IS_SPLIT=is_split, MIN_SEGMENT=MIN_SEGMENT, TILE_TOKENS=tile.num_tokens,
        PATH_SIZE=path.size, HAS_FIRST=own is not None and own[3] is not None,
        BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        BLOCK_H=max(16, triton.next_power_of_2(head_dim - first_key)),
        WIDE=_TYPES[wide], num_warps=tile.num_warps, num_stages=2, **shared,
    )  # fmt: skip
    if is_split:
        merge_kernel[(batch * num_tokens, num_heads)](
            parts, sinks, out, num_segments,
            NUM_HEADS=num_heads, BLOCK_G=triton.next_power_of_2(num_segments),
            num_warps=8 if value_dim > WIDE_DIM else 4, **shared,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class Tile:
    """Tokens, rows (tokens times grouped heads, padded) and keys of a program."""

    num_tokens: int
    rows: int
    keys: int
    num_warps: int

    @property
    def is_large(self) -> bool:
        """True of those of prompts, which compute more than they read."""
        return self.rows > LARGE_ROWS


LARGE_ROWS = 64
WIDE_DIM = 256  # beyond it a tile has few rows, or their values would not fit registers
WIDE_ROWS = 32


def split_group(group: int, value_dim: int) -> int:
    """The number of tiles that the heads of a KV head are split into: as few as let registers hold
    their values.
    """
    most = WIDE_ROWS if value_dim > WIDE_DIM else group
    parts = (n for n in range(1, group + 1) if group % n == 0 and group // n <= most)
    return next(parts)


def choose_tile(num_rows: int, group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Number of whole tokens of a program; more for narrower dtypes."""
    is_wide = head_dim > WIDE_DIM
    most = WIDE_ROWS if dtype.itemsize > 2 or is_wide else 128 if head_dim <= 128 else 64
    rows = max(16, min(triton.next_power_of_2(num_rows), most), triton.next_power_of_2(group))
    keys = 16 if dtype.itemsize > 2 else 64 if head_dim <= 128 else 32
    return Tile(rows // group, rows, keys, 8 if rows > LARGE_ROWS or is_wide else 4)


def choose_segments(num_programs: int, most_keys: int, *, is_large: bool = False) -> int:
    """The number of segments that contexts are cut into; 1 if the tiles alone fill a GPU."""
    wanted = (ENOUGH_LARGE if is_large else ENOUGH_PROGRAMS) // max(num_programs, 1)
    return max(1, min(wanted, MAX_SEGMENTS, triton.cdiv(most_keys, MIN_SEGMENT)))


_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
