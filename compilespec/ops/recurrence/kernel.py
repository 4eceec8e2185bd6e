"""cached_recurrence in Triton: a program takes one request's tokens through a tile of its state.

The grid has every token; programs of tokens that do not begin a request's run end at once, so that
nothing is read back to the host.  A second launch keeps the inputs of tokens that do not commit:
by then all of the first have read the ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compilespec.ops._tensors import dense_rows, wide_dtype

_CELLS = 4096  # of a tile
_COPIED = 1024  # elements that one program of `keep_kernel` copies
_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def cached_recurrence(
    query_BSNK: Tensor,
    key_BSNK: Tensor,
    value_BSHV: Tensor,
    decay: Tensor,
    beta_BSH: Tensor | None,
    state_RHKV: Tensor,
    recent_RPE: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
    absorbed_BS: Tensor,
    commits_BS: Tensor,
    kind: str,
) -> Tensor:
    """See `cached_recurrence_reference`; a row outside the state counts as -1."""
    batch, num_tokens, heads, value_dim = value_BSHV.shape
    key_heads, key_dim = key_BSNK.shape[2:]
    out = torch.empty_like(value_BSHV, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    parts = TokenTensors(
        part_of(query_BSNK), part_of(key_BSNK), part_of(value_BSHV),
        part_of(decay if decay.dim() == 4 else decay.unsqueeze(3)),
        part_of(value_BSHV if beta_BSH is None else beta_BSH.unsqueeze(3)),
    )  # fmt: skip
    places = TokenPlaces(row_BS.contiguous(), position_BS.contiguous(), absorbed_BS.contiguous(),
                    commits_BS.contiguous())  # fmt: skip
    tile = choose_tile(heads, key_dim, value_dim)
    sizes = {
        "KEY_HEADS": key_heads, "GROUP": heads // key_heads, "KEYS": key_dim, "VALUES": value_dim,
        "DECAYS": key_dim if decay.dim() == 4 else 1, "HAS_BETA": beta_BSH is not None,
    }  # fmt: skip
    counts = (batch * num_tokens, num_tokens, state_RHKV.shape[0], recent_RPE.shape[1])
    per_head = triton.cdiv(value_dim, tile)
    tiles = triton.cdiv(heads, tile) if value_dim == 1 else heads * per_head
    advance_kernel[(batch * num_tokens, tiles)](
        parts, places, state_RHKV, recent_RPE, out, *counts,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_C=tile,
        WIDE=_TYPES[wide_dtype(value_BSHV.dtype)], num_warps=4, **sizes,
    )  # fmt: skip
    if recent_RPE.shape[1]:
        keep_kernel[(batch * num_tokens, triton.cdiv(recent_RPE.shape[2], _COPIED))](
            parts, places, recent_RPE, *counts, BLOCK=_COPIED, **sizes
        )
    return out


def choose_tile(heads: int, key_dim: int, value_dim: int) -> int:
    """Columns of a program; they may be those of several heads only if each has one."""
    columns = heads if value_dim == 1 else value_dim
    most = max(1, _CELLS // triton.next_power_of_2(key_dim))
    return min(most, triton.next_power_of_2(columns))


class TokenTensor(NamedTuple):
    """Queries, keys, values, decays or betas [B, S, heads, width], the last dimension dense."""

    data: Any
    b: Any  # strides
    s: Any
    h: Any


class TokenTensors(NamedTuple):
    """The numbers of each token: query, key, value, decay, beta."""

    query: TokenTensor
    key: TokenTensor
    value: TokenTensor
    decay: TokenTensor
    beta: TokenTensor


class TokenPlaces(NamedTuple):
    """The places of each token: state row, position, tokens in its request's state, and true if it
    commits.
    """

    row: Any
    position: Any
    absorbed: Any
    commits: Any


def part_of(tensor: Tensor) -> TokenTensor:
    """A tensor [B, S, heads, width] as a kernel's argument."""
    tensor = dense_rows(tensor)
    return TokenTensor(tensor, *tensor.stride()[:3])


@triton.jit
def row_of(places, token, num_tokens, num_rows):
    row = tl.load(places.row + token, mask=(token >= 0) & (token < num_tokens), other=-1)
    return tl.where(row < num_rows, row, -1).to(tl.int64)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_batch", "num_rows", "num_kept"])
def advance_kernel(
    parts, places, state_ptr, recent_ptr, out_ptr,
    num_tokens, tokens_per_batch, num_rows, num_kept,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    DECAYS: tl.constexpr, HAS_BETA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    HEAD_TILES: tl.constexpr = (VALUES + BLOCK_C - 1) // BLOCK_C
    if VALUES == 1:  # a column is a head
        head_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        v_C = tl.zeros_like(head_C)
        h = head_C
    else:  # the columns of one head
        h = tl.program_id(1) // HEAD_TILES + tl.zeros([1], tl.int32)
        v_C = tl.program_id(1) % HEAD_TILES * BLOCK_C + tl.arange(0, BLOCK_C)
        head_C = h + tl.zeros_like(v_C)
    is_column_C = (head_C < HEADS) & (v_C < VALUES)
    k = tl.arange(0, BLOCK_K)
    is_key = (k < KEYS)[:, None] & (h < HEADS)[None, :]  # [K, 1] or [K, C], as all of keys are
    is_cell_KC = (k < KEYS)[:, None] & is_column_C[None, :]
    row = row_of(places, token, num_tokens, num_rows)
    out_C = token.to(tl.int64) * (HEADS * VALUES) + head_C * VALUES + v_C
    if row < 0:
        zero_C = tl.zeros([BLOCK_C], WIDE).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_C, zero_C, mask=is_column_C)
        return
    if row_of(places, token - 1, num_tokens, num_rows) == row:
        return  # the program of an earlier token takes this one

    first = tl.load(places.position + token)
    absorbed = tl.maximum(tl.load(places.absorbed + token), tl.maximum(first - num_kept, 0))
    num_replayed = tl.maximum(first - absorbed, 0)
    cell_KC = (row * HEADS + head_C[None, :]) * KEYS + k[:, None]
    cell_KC = cell_KC * VALUES + v_C[None, :]
    state_KC = tl.load(state_ptr + cell_KC, mask=is_cell_KC & (first > 0), other=0.0)
    place = -num_replayed  # of the token at hand, counted from the call's first one
    state_row = row
    while state_row == row:  # kept tokens and new ones alike: their sums have the same bits
        is_new = place >= 0
        now = tl.maximum(token + place, token)
        b = (now // tokens_per_batch).to(tl.int64)
        s = (now % tokens_per_batch).to(tl.int64)
        column = (first + place + num_kept) % tl.maximum(num_kept, 1)
        WIDTH: tl.constexpr = KEY_HEADS * KEYS + HEADS * (VALUES + DECAYS + (1 if HAS_BETA else 0))
        kept = recent_ptr + (row * num_kept + column) * WIDTH

        key_place = (h // GROUP)[None, :] * KEYS + k[:, None]
        key = either(parts.key, b, s, (h // GROUP)[None, :], k[:, None], kept + key_place, is_key,
                     is_new, WIDE)  # fmt: skip
        kept += KEY_HEADS * KEYS
        value_C = either(parts.value, b, s, head_C, v_C, kept + head_C * VALUES + v_C,
                         is_column_C, is_new, WIDE)  # fmt: skip
        kept += HEADS * VALUES
        d = tl.minimum(k, DECAYS - 1)[:, None]
        decay = either(parts.decay, b, s, h[None, :], d, kept + h[None, :] * DECAYS + d, is_key,
                       is_new, WIDE)  # fmt: skip
        state_KC = state_KC * tl.exp(decay)
        update_C = value_C
        if HAS_BETA:
            kept += HEADS * DECAYS
            beta = either(parts.beta, b, s, h, 0, kept + h, h < HEADS, is_new, WIDE)
            update_C = (value_C - tl.sum(state_KC * key, 0)) * beta
        state_KC += key * update_C[None, :]
        if is_new:
            query_at = parts.query.data + b * parts.query.b + s * parts.query.s
            query_at += (h // GROUP)[None, :] * parts.query.h + k[:, None]
            query = tl.load(query_at, mask=is_key, other=0.0).to(WIDE)
            found_C = tl.sum(state_KC * query, 0).to(out_ptr.dtype.element_ty)
            at_C = out_C + place.to(tl.int64) * (HEADS * VALUES)
            tl.store(out_ptr + at_C, found_C, mask=is_column_C)
            is_last = row_of(places, now + 1, num_tokens, num_rows) != row
            is_last |= tl.load(places.commits + now + 1, mask=is_last == 0, other=0) == 0
            if (tl.load(places.commits + now) != 0) & is_last:  # the last one that commits
                tl.store(state_ptr + cell_KC, state_KC, mask=is_cell_KC)
        place += 1
        state_row = tl.where(place < 0, row, row_of(places, token + place, num_tokens, num_rows))


@triton.jit
def either(part, b, s, head, place, kept, mask, is_new, WIDE: tl.constexpr):
    new = part.data + b * part.b + s * part.s + head * part.h + place
    new = tl.load(new, mask=mask & is_new, other=0.0).to(WIDE)
    return tl.where(is_new, new, tl.load(kept, mask=mask & (is_new == 0), other=0.0))


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_batch", "num_rows", "num_kept"])
def keep_kernel(
    parts, places, recent_ptr, num_tokens, tokens_per_batch, num_rows, num_kept,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    DECAYS: tl.constexpr, HAS_BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = row_of(places, token, num_tokens, num_rows)
    if (row < 0) | (tl.load(places.commits + token) != 0):
        return
    if row_of(places, token + num_kept, num_tokens, num_rows) == row:
        return  # a later token has its place
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    WIDTH: tl.constexpr = KEY_HEADS * KEYS + HEADS * (VALUES + DECAYS + (1 if HAS_BETA else 0))
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = (token // tokens_per_batch).to(tl.int64)
    s = (token % tokens_per_batch).to(tl.int64)
    column = (tl.load(places.position + token) + num_kept) % num_kept
    kept = recent_ptr + (row * num_kept + column) * WIDTH + e
    copy(parts.key, b, s, e, kept, KEY_HEADS, KEYS)
    start: tl.constexpr = KEY_HEADS * KEYS
    copy(parts.value, b, s, e - start, kept, HEADS, VALUES)
    copy(parts.decay, b, s, e - start - HEADS * VALUES, kept, HEADS, DECAYS)
    if HAS_BETA:
        copy(parts.beta, b, s, e - start - HEADS * (VALUES + DECAYS), kept, HEADS, 1)


@triton.jit
def copy(part, b, s, place, kept, HEADS: tl.constexpr, SIZE: tl.constexpr):
    is_mine = (place >= 0) & (place < HEADS * SIZE)
    at = part.data + b * part.b + s * part.s + place // SIZE * part.h + place % SIZE
    tl.store(kept, tl.load(at, mask=is_mine, other=0.0).to(kept.dtype.element_ty), mask=is_mine)
