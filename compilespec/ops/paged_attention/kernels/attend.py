"""Write K and V to the cache, attend by tiles of rows, merge the splits."""

from __future__ import annotations

import triton
import triton.language as tl


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
    lo_M, stop_M, root_M = _seen(
        path, token_M, is_token_M, position_M, hi_M, WINDOW, PATH_SIZE, HAS_FIRST
    )
    h, v = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    place_M = b.to(tl.int64) * query.b + s_M.to(tl.int64) * query.s + head_M * query.n
    is_live_M = is_token_M & (row_M >= 0)
    query_MH = tl.load(
        query.data + place_M[:, None] + (FIRST_KEY + h)[None, :],
        mask=is_live_M[:, None] & (h < HEAD_DIM - FIRST_KEY)[None, :], other=0.0,
    )  # fmt: skip
    query_MV = query_MH  # not read, unless a value is the beginning of its key
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
        top_M, sum_M, acc_MV = _add_path(
            path, b, group // GROUP_PARTS, token_M, is_here_M, root_M, lo_M, query_MH, query_MV,
            top_M, sum_M, acc_MV, HEAD_DIM, FIRST_KEY, VALUE_DIM, SCALE, SOFTCAP, PATH_SIZE,
            BLOCK_N, BLOCK_H, BLOCK_V,
        )  # fmt: skip
    _put(
        out_ptr, parts, sinks_ptr, token_M, head_M, is_token_M, top_M, sum_M, acc_MV,
        NUM_GROUPS * GROUP, VALUE_DIM, BLOCK_V, HAS_SINKS, IS_SPLIT, WIDE,
    )  # fmt: skip


@triton.jit
def _seen(
    path, token_M, is_token_M, position_M, hi_M,
    WINDOW: tl.constexpr, PATH_SIZE: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """The cache's positions that each row sees, first and end, and where its path begins."""
    lo_M = tl.zeros_like(position_M)
    if WINDOW > 0:
        lo_M = tl.maximum(position_M - (WINDOW - 1), 0)
    root_M = position_M + 1
    if PATH_SIZE > 0:
        if HAS_FIRST:
            lo_M = tl.maximum(tl.load(path.first + token_M, mask=is_token_M, other=0), 0)
            lo_M = tl.minimum(lo_M, root_M)
        else:
            for p in range(PATH_SIZE):
                own_M = tl.load(path.index + token_M * PATH_SIZE + p, mask=is_token_M, other=-1)
                root_M -= (own_M >= 0).to(tl.int32)
        hi_M = tl.minimum(hi_M, root_M)
    return lo_M, hi_M, root_M


@triton.jit
def _add_path(
    path, b, kv_head, token_M, is_here_M, root_M, lo_M, query_MH, query_MV, top_M, sum_M, acc_MV,
    HEAD_DIM: tl.constexpr, FIRST_KEY: tl.constexpr, VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PATH_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The running softmax with the keys of the call that are on each row's path."""
    h, v = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
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
    return top_M, sum_M, acc_MV


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
def _put(
    out_ptr, parts, sinks_ptr, token_M, head_M, is_token_M, top_M, sum_M, acc_MV,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the results of the rows, or of one segment of their contexts."""
    v = tl.arange(0, BLOCK_V)
    result_M = token_M.to(tl.int64) * NUM_HEADS + head_M
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
