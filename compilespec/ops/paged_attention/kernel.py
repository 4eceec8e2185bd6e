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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops._tensors import dense_rows, wide_dtype
from compilespec.ops.paged_attention.choice import why_not_flash
from compilespec.ops.paged_attention.form import form_of

ENOUGH_PROGRAMS = 512  # at most this many, where contexts are split; two to four a multiprocessor
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
        Heads(key_BNSH, *key_BNSH.stride()[:3]), Heads(value_BNSH, *value_BNSH.stride()[:3]),
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
    num_segments = choose_segments(num_tiles * num_groups, most_keys)
    is_split = num_segments > 1
    parts = Parts(out, out, out)
    if is_split:
        shape = (batch * num_tokens, num_heads, num_segments)
        parts = Parts(*(out.new_empty((*shape, n), dtype=wide) for n in (value_dim, 1, 1)))
    query_BNSH = dense_rows(query_BNSH)
    places = Places(row_BS.contiguous(), position_BS.contiguous())
    sinks = query_BNSH if sinks_N is None else sinks_N.contiguous()
    path = Path.of(own, query_BNSH, places.row)
    shared = {
        "HAS_SINKS": sinks_N is not None, "VALUE_DIM": value_dim,
        "BLOCK_V": triton.next_power_of_2(value_dim),
    }  # fmt: skip
    values = key_cache if value_cache is None else value_cache
    attend_kernel[(num_tiles, num_groups, num_segments)](
        Heads(query_BNSH, *query_BNSH.stride()[:3]),
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


WIDE_DIM = 256  # beyond it a tile has few rows, or their values would not fit registers
WIDE_ROWS = 32


def split_group(group: int, value_dim: int) -> int:
    """Into how many tiles the heads of a KV head go: as few as let registers hold their values."""
    most = WIDE_ROWS if value_dim > WIDE_DIM else group
    parts = (n for n in range(1, group + 1) if group % n == 0 and group // n <= most)
    return next(parts)


def choose_tile(num_rows: int, group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Number of whole tokens of a program; more for narrower dtypes."""
    is_wide = head_dim > WIDE_DIM
    most = WIDE_ROWS if dtype.itemsize > 2 or is_wide else 128 if head_dim <= 128 else 64
    rows = max(16, min(triton.next_power_of_2(num_rows), most), triton.next_power_of_2(group))
    keys = 16 if dtype.itemsize > 2 else 64 if head_dim <= 128 else 32
    return Tile(rows // group, rows, keys, 8 if rows > 64 or is_wide else 4)


def choose_segments(num_programs: int, most_keys: int) -> int:
    """Into how many segments contexts are cut; 1 if the tiles alone fill a GPU."""
    wanted = ENOUGH_PROGRAMS // max(num_programs, 1)
    return max(1, min(wanted, MAX_SEGMENTS, triton.cdiv(most_keys, MIN_SEGMENT)))


_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


class Heads(NamedTuple):
    """Queries, keys or values [B, N, S, H] of a step, the last dimension dense."""

    data: Any
    b: Any  # strides
    n: Any
    s: Any


class Cache(NamedTuple):
    """Keys and values by block, and which blocks a state row has."""

    key: Any  # [blocks, block size, KV heads, H]
    value: Any
    table: Any  # int32 [R, M]


class Places(NamedTuple):
    """State row and position of each token: int32 [B, S], -1 for none."""

    row: Any
    position: Any


class Path(NamedTuple):
    """The keys and values of a call, and which of them each of its tokens sees instead of the
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
        heads = [Heads(x, *x.stride()[:3]) for x in (key, value)]
        return cls(*heads, path.contiguous(), key.shape[2], first.contiguous())

    @property
    def size(self) -> int:
        """P; 0 where tokens have none."""
        return self.index.shape[2] if self.index.dim() == 3 else 0


class Parts(NamedTuple):
    """The results of a context's segments: weighted values, highest score, sum of weights."""

    value: Any
    top: Any
    sum: Any


@triton.jit(do_not_specialize=["tokens_per_batch", "num_cells"])
def write_kernel(
    key, value, key_cache_ptr, value_cache_ptr, slot_ptr, tokens_per_batch, num_cells,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_cells):
        return
    b, s = (token // tokens_per_batch).to(tl.int64), token % tokens_per_batch
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, h = place // HEAD_DIM, place % HEAD_DIM
    is_inside = place < NUM_KV_HEADS * HEAD_DIM
    copied = tl.load(key.data + b * key.b + head * key.n + s * key.s + h, mask=is_inside)
    tl.store(key_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM) + place, copied, mask=is_inside)
    if VALUE_DIM > 0:
        head, h = place // VALUE_DIM, place % VALUE_DIM
        is_inside = place < NUM_KV_HEADS * VALUE_DIM
        copied = tl.load(
            value.data + b * value.b + head * value.n + s * value.s + h, mask=is_inside
        )
        tl.store(
            value_cache_ptr + slot * (NUM_KV_HEADS * VALUE_DIM) + place, copied, mask=is_inside
        )


@triton.jit(do_not_specialize=["tokens_per_batch", "table_rows", "num_blocks"])
def attend_kernel(
    query, cache, places, path, sinks_ptr, out_ptr, parts,
    tokens_per_batch, table_rows, table_blocks, num_blocks,
    NUM_GROUPS: tl.constexpr, GROUP_PARTS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, FIRST_KEY: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SPLIT: tl.constexpr,
    MIN_SEGMENT: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
    PATH_SIZE: tl.constexpr, HAS_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles_per_batch = tl.cdiv(tokens_per_batch, TILE_TOKENS)
    b = tl.program_id(0) // tiles_per_batch
    group = tl.program_id(1)  # of the heads that share a KV head, or a part of them
    m = tl.arange(0, BLOCK_M)
    s_M = tl.program_id(0) % tiles_per_batch * TILE_TOKENS + m // GROUP
    head_M = group * GROUP + m % GROUP
    is_token_M = (m < TILE_TOKENS * GROUP) & (s_M < tokens_per_batch)
    token_M = b * tokens_per_batch + s_M
    row_M = tl.load(places.row + token_M, mask=is_token_M, other=-1)
    row_M = tl.where(row_M < table_rows, row_M, -1)
    position_M = tl.load(places.position + token_M, mask=is_token_M, other=-1)
    hi_M = tl.minimum(tl.where(row_M >= 0, position_M, -1), table_blocks * BLOCK_SIZE - 1) + 1
    lo_M = tl.zeros_like(position_M)
    if WINDOW > 0:
        lo_M = tl.maximum(position_M - (WINDOW - 1), 0)
    stop_M = hi_M  # of what the cache holds
    if PATH_SIZE > 0:
        root_M = position_M + 1
        if HAS_FIRST:
            lo_M = tl.maximum(tl.load(path.first + token_M, mask=is_token_M, other=0), 0)
            lo_M = tl.minimum(lo_M, root_M)
        else:
            for p in range(PATH_SIZE):
                own_M = tl.load(path.index + token_M * PATH_SIZE + p, mask=is_token_M, other=-1)
                root_M -= (own_M >= 0).to(tl.int32)
        stop_M = tl.minimum(hi_M, root_M)
    h, v = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    place_M = b.to(tl.int64) * query.b + s_M.to(tl.int64) * query.s + head_M * query.n
    is_live_M = is_token_M & (row_M >= 0)
    query_MH = tl.load(
        query.data + place_M[:, None] + (FIRST_KEY + h)[None, :],
        mask=is_live_M[:, None] & (h < HEAD_DIM - FIRST_KEY)[None, :], other=0.0,
    )  # fmt: skip
    if FIRST_KEY > 0:
        query_MV = tl.load(
            query.data + place_M[:, None] + v[None, :],
            mask=is_live_M[:, None] & (v < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip

    minus_inf = float("-inf")
    top_M = tl.full([BLOCK_M], minus_inf, WIDE)
    sum_M = tl.zeros([BLOCK_M], WIDE)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], WIDE)
    first = tl.min(tl.where(stop_M > lo_M, lo_M, 2147483647), 0) // BLOCK_N * BLOCK_N
    segment = tl.cdiv(tl.max(stop_M, 0) - first, tl.num_programs(2) * MIN_SEGMENT) * MIN_SEGMENT
    segment_begin = first + tl.program_id(2) * segment
    left_M = tl.where(stop_M > lo_M, row_M, -1)
    row = tl.max(left_M, 0)
    while row >= 0:  # once per request with tokens in the tile
        is_mine_M = left_M == row
        begin = tl.min(tl.where(is_mine_M, lo_M, 2147483647), 0)
        end = tl.max(tl.where(is_mine_M, stop_M, 0), 0)
        begin = tl.maximum(begin // BLOCK_N * BLOCK_N, segment_begin)
        end = tl.minimum(end, segment_begin + segment)
        for base in range(begin, end, BLOCK_N):
            key_N = base + tl.arange(0, BLOCK_N)
            block_N = tl.load(
                cache.table + row.to(tl.int64) * table_blocks + key_N // BLOCK_SIZE,
                mask=key_N < end, other=-1,
            )  # fmt: skip
            is_present_N = (block_N >= 0) & (block_N < num_blocks)
            cell_N = block_N.to(tl.int64) * BLOCK_SIZE + key_N % BLOCK_SIZE
            cell_N = cell_N * (NUM_GROUPS // GROUP_PARTS) + group // GROUP_PARTS
            key_NH = tl.load(
                cache.key + cell_N[:, None] * HEAD_DIM + (FIRST_KEY + h)[None, :],
                mask=is_present_N[:, None] & (h < HEAD_DIM - FIRST_KEY)[None, :], other=0.0,
            )  # fmt: skip
            score_MN = tl.dot(query_MH, tl.trans(key_NH), input_precision="ieee")
            if FIRST_KEY > 0:
                value_NV = tl.load(
                    cache.key + cell_N[:, None] * HEAD_DIM + v[None, :],
                    mask=is_present_N[:, None] & (v < VALUE_DIM)[None, :], other=0.0,
                )  # fmt: skip
                score_MN += tl.dot(query_MV, tl.trans(value_NV), input_precision="ieee")
            score_MN *= SCALE
            if SOFTCAP > 0:
                score_MN = SOFTCAP - 2 * SOFTCAP / (tl.exp(score_MN * (2 / SOFTCAP)) + 1)
            is_visible_MN = (key_N[None, :] >= lo_M[:, None]) & (key_N[None, :] < stop_M[:, None])
            is_visible_MN &= is_mine_M[:, None] & is_present_N[None, :]
            score_MN = tl.where(is_visible_MN, score_MN, minus_inf)
            new_M = tl.maximum(top_M, tl.max(score_MN, 1))
            base_M = tl.where(new_M == minus_inf, 0.0, new_M)
            weight_MN = tl.exp(score_MN - base_M[:, None])
            fade_M = tl.exp(top_M - base_M)
            sum_M = sum_M * fade_M + tl.sum(weight_MN, 1)
            if FIRST_KEY == 0:
                value_NV = tl.load(
                    cache.value + cell_N[:, None] * VALUE_DIM + v[None, :],
                    mask=is_present_N[:, None] & (v < VALUE_DIM)[None, :], other=0.0,
                )  # fmt: skip
            mixed_MV = tl.dot(weight_MN.to(value_NV.dtype), value_NV, input_precision="ieee")
            acc_MV = acc_MV * fade_M[:, None] + mixed_MV
            top_M = new_M
        left_M = tl.where(is_mine_M, -1, left_M)
        row = tl.max(left_M, 0)

    if PATH_SIZE > 0:
        is_here_M = is_live_M & (tl.program_id(2) == tl.num_programs(2) - 1)
        kv_head = group // GROUP_PARTS
        for base in range(0, path.num_keys, BLOCK_N):
            key_N = base + tl.arange(0, BLOCK_N)
            is_visible_MN = (key_N[None, :] < 0) & is_here_M[:, None]
            for p in range(PATH_SIZE):
                own_M = tl.load(path.index + token_M * PATH_SIZE + p, mask=is_here_M, other=-1)
                own_M = tl.where(root_M + p >= lo_M, own_M, -1)
                is_visible_MN |= own_M[:, None] == key_N[None, :]
            is_present_N = key_N < path.num_keys
            place_N = b.to(tl.int64) * path.key.b + kv_head * path.key.n
            place_N += key_N.to(tl.int64) * path.key.s
            key_NH = tl.load(
                path.key.data + place_N[:, None] + (FIRST_KEY + h)[None, :],
                mask=is_present_N[:, None] & (h < HEAD_DIM - FIRST_KEY)[None, :], other=0.0,
            )  # fmt: skip
            score_MN = tl.dot(query_MH, tl.trans(key_NH), input_precision="ieee")
            place_N = b.to(tl.int64) * path.value.b + kv_head * path.value.n
            place_N += key_N.to(tl.int64) * path.value.s
            value_NV = tl.load(
                path.value.data + place_N[:, None] + v[None, :],
                mask=is_present_N[:, None] & (v < VALUE_DIM)[None, :], other=0.0,
            )  # fmt: skip
            if FIRST_KEY > 0:
                score_MN += tl.dot(query_MV, tl.trans(value_NV), input_precision="ieee")
            top_M, sum_M, acc_MV = _add_keys(
                score_MN, is_visible_MN, value_NV, top_M, sum_M, acc_MV, SCALE, SOFTCAP
            )

    result_M = token_M.to(tl.int64) * (NUM_GROUPS * GROUP) + head_M
    is_value_MV = is_token_M[:, None] & (v < VALUE_DIM)[None, :]
    if not IS_SPLIT:
        if HAS_SINKS:
            sink_M = tl.load(sinks_ptr + head_M, mask=is_token_M, other=0.0).to(WIDE)
            new_M = tl.maximum(top_M, sink_M)
            fade_M = tl.exp(top_M - new_M)
            sum_M = sum_M * fade_M + tl.exp(sink_M - new_M)
            acc_MV = acc_MV * fade_M[:, None]
        out_MV = acc_MV / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
        place_MV = result_M[:, None] * VALUE_DIM + v[None, :]
        tl.store(out_ptr + place_MV, out_MV.to(out_ptr.dtype.element_ty), mask=is_value_MV)
    else:
        part_M = result_M * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts.top + part_M, top_M, mask=is_token_M)
        tl.store(parts.sum + part_M, sum_M, mask=is_token_M)
        place_MV = part_M[:, None] * VALUE_DIM + v[None, :]
        tl.store(parts.value + place_MV, acc_MV, mask=is_value_MV & (sum_M != 0)[:, None])


@triton.jit
def _add_keys(
    score_MN, is_visible_MN, value_NV, top_M, sum_M, acc_MV,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The running softmax with more keys."""
    score_MN *= SCALE
    if SOFTCAP > 0:
        score_MN = SOFTCAP - 2 * SOFTCAP / (tl.exp(score_MN * (2 / SOFTCAP)) + 1)
    score_MN = tl.where(is_visible_MN, score_MN, float("-inf"))
    new_M = tl.maximum(top_M, tl.max(score_MN, 1))
    base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    weight_MN = tl.exp(score_MN - base_M[:, None])
    fade_M = tl.exp(top_M - base_M)
    sum_M = sum_M * fade_M + tl.sum(weight_MN, 1)
    mixed_MV = tl.dot(weight_MN.to(value_NV.dtype), value_NV, input_precision="ieee")
    return new_M, sum_M, acc_MV * fade_M[:, None] + mixed_MV


@triton.jit
def merge_kernel(
    parts, sinks_ptr, out_ptr, num_segments,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    g, v = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V)
    result = token.to(tl.int64) * NUM_HEADS + head
    part_G = result * num_segments + g
    sum_G = tl.load(parts.sum + part_G, mask=g < num_segments, other=0.0)
    is_part_G = sum_G != 0  # a NaN is a part; of others no value was written
    top_G = tl.load(parts.top + part_G, mask=is_part_G, other=float("-inf"))
    top = tl.max(top_G, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(top.dtype)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    fade_G = tl.exp(top_G - base)
    total = tl.sum(sum_G * fade_G, 0)
    if HAS_SINKS:
        total += tl.exp(sink - base)
    part_GV = tl.load(
        parts.value + part_G[:, None] * VALUE_DIM + v[None, :],
        mask=is_part_G[:, None] & (v < VALUE_DIM)[None, :], other=0.0,
    )  # fmt: skip
    out_V = tl.sum(part_GV * fade_G[:, None], 0) / tl.where(total > 0, total, 1.0)
    place_V = result * VALUE_DIM + v
    tl.store(out_ptr + place_V, out_V.to(out_ptr.dtype.element_ty), mask=v < VALUE_DIM)
