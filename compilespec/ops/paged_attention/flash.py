"""Paged attention by FlashAttention-3, through torch's varlen attention with a block table.

The library takes sequences, each with a row of a block table and a length, and lets the last query
of a sequence see its last key.  So tokens go to it as runs: neighbours of a batch row that stand at
consecutive positions of one request; padded tokens are runs that see nothing.  Where runs begin,
how long they are and which blocks they have is found on the device, in room for as many as there
are tokens: nothing is read back to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import varlen

from compilespec.ops.paged_attention.form import Form
from compilespec.ops.paged_attention.reference import paged_attention_reference

_TOLERANCE = 2e-2  # of outputs of order 1 in bfloat16
_BLOCK_T = 1024


def attend(
    query_BNSH: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
    block_table_RM: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Attend to the cache only: [B, S, N, H]; see `paged_attention_reference`.

    Blocks of -1 before a token's position are read as block 0: no token may see one.
    """
    batch, num_heads, num_tokens, head_dim = query_BNSH.shape
    out_BSNH = query_BNSH.new_empty((batch, num_tokens, num_heads, head_dim))
    if batch * num_tokens == 0:
        return out_BSNH
    num_blocks, block_size = key_cache.shape[:2]
    runs = find_runs(row_BS, position_BS, block_table_RM, num_blocks, block_size)
    varlen.varlen_attn_out(
        out_BSNH.view(-1, num_heads, head_dim),
        query_BNSH.transpose(1, 2).reshape(-1, num_heads, head_dim),
        key_cache,
        value_cache,
        runs.start,
        None,
        num_tokens,
        block_table_RM.shape[1] * block_size,
        scale=scale,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=True,
        seqused_k=runs.length,
        block_table=runs.blocks,
    )
    return out_BSNH


class Runs(NamedTuple):
    """Runs of a call's T tokens, in order; those behind the last one are empty.  All int32."""

    start: Tensor  # [T + 1], the token that each begins with; T from the first empty one on
    length: Tensor  # [T], keys that its last token sees
    blocks: Tensor  # [T, M], its request's row of the block table, no entry outside the cache


def find_runs(
    row_BS: Tensor, position_BS: Tensor, block_table_RM: Tensor, num_blocks: int, block_size: int
) -> Runs:
    """The runs of a call's tokens; those of one that is padded have length 0."""
    num_tokens, (table_rows, table_blocks) = row_BS.numel(), block_table_RM.shape
    runs = Runs(
        row_BS.new_empty(num_tokens + 1),
        row_BS.new_empty(num_tokens),
        row_BS.new_empty((num_tokens, table_blocks)),
    )
    runs_kernel[(num_tokens,)](
        row_BS.contiguous(), position_BS.contiguous(), block_table_RM.contiguous(), *runs,
        num_tokens, row_BS.shape[1], table_rows, num_blocks, table_blocks * block_size,
        TABLE_BLOCKS=table_blocks, BLOCK_T=_BLOCK_T,
        BLOCK_M=triton.next_power_of_2(table_blocks),
    )  # fmt: skip
    return runs


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_batch", "table_rows", "num_blocks"])
def runs_kernel(
    row_ptr, position_ptr, table_ptr, start_ptr, length_ptr, blocks_ptr,
    num_tokens, tokens_per_batch, table_rows, num_blocks, most_keys,
    TABLE_BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    t, m = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_M)
    up_to_T = tl.zeros([BLOCK_T], tl.int32)  # runs that begin with the token, or before it
    all_T = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, num_tokens, BLOCK_T):
        begins_T = begins(
            row_ptr, position_ptr, base + t, num_tokens, tokens_per_batch, most_keys
        ).to(tl.int32)
        all_T += begins_T
        up_to_T += tl.where(base + t <= token, begins_T, 0)
    run, num_runs = tl.sum(up_to_T, 0) - 1, tl.sum(all_T, 0)

    here = token + tl.arange(0, 2)
    begins_2 = begins(row_ptr, position_ptr, here, num_tokens, tokens_per_batch, most_keys)
    tl.store(start_ptr + run + tl.zeros_like(here), here, mask=begins_2 & (here == token))
    place_M, is_block_M = blocks_ptr + m, m < TABLE_BLOCKS
    if token == 0:
        tl.store(start_ptr + num_tokens, num_tokens)
    if token >= num_runs:  # its entry is that of an empty run
        tl.store(start_ptr + token, num_tokens)
        tl.store(length_ptr + token, 0)
        tl.store(place_M + token.to(tl.int64) * TABLE_BLOCKS, tl.zeros_like(m), mask=is_block_M)
    is_last = (token == num_tokens - 1) | (tl.sum(tl.where(here > token, begins_2, False), 0) > 0)
    if is_last:
        row, position = tl.load(row_ptr + token), tl.load(position_ptr + token)
        is_live = (row >= 0) & (row < table_rows)
        length = tl.where(is_live, tl.maximum(tl.minimum(position + 1, most_keys), 0), 0)
        block_M = tl.load(
            table_ptr + row.to(tl.int64) * TABLE_BLOCKS + m, mask=is_block_M & is_live, other=0
        )
        block_M = tl.where((block_M >= 0) & (block_M < num_blocks), block_M, 0)
        tl.store(length_ptr + run, length)
        tl.store(place_M + run.to(tl.int64) * TABLE_BLOCKS, block_M, mask=is_block_M)


@triton.jit
def begins(row_ptr, position_ptr, t, num_tokens, tokens_per_batch, most_keys):
    """True where a token begins a run: it does not follow on the one before it."""
    is_token = t < num_tokens
    has_before = is_token & (t % tokens_per_batch > 0)
    row = tl.load(row_ptr + t, mask=is_token, other=-1)
    position = tl.load(position_ptr + t, mask=is_token, other=-1)
    row_before = tl.load(row_ptr + t - 1, mask=has_before, other=-1)
    position_before = tl.load(position_ptr + t - 1, mask=has_before, other=-1)
    is_next = (position == position_before + 1) & (position < most_keys)
    return is_token & ~(has_before & (row == row_before) & ((row < 0) | is_next))


def why_wrong(form: Form, device: torch.device) -> str:
    """The library's error in a small case; "" if it gives the reference's outputs."""
    arguments = _small_case(form, device)
    query, _, _, keys, values, _, row, position, table, scale, window, *_ = arguments
    want = paged_attention_reference(*arguments)
    try:
        got = attend(query, keys, values, row, position, table, scale, window)
        largest = float((got.float() - want.float()).abs().max())
    except Exception as error:  # for any error of the library, our kernel serves
        first = (str(error).splitlines() or [""])[0]
        return f"it failed in a small case ({type(error).__name__}: {first})"
    if largest <= _TOLERANCE:
        return ""
    return f"it is off by {largest:.2g} in a small case"


def _small_case(form: Form, device: torch.device) -> tuple[Any, ...]:
    """Two requests, padded tokens before, behind and beside theirs; written to the caches."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, form.dtype)

    num_tokens, context = 3, (70, 5)
    blocks = -(-max(context) // form.block_size) + 1
    row = [[0] * num_tokens, [1, 1, -1], [-1] * num_tokens]
    position = [[context[0] + i for i in range(3)], [context[1], context[1] + 1, 0], [0] * 3]
    table = torch.arange(2 * blocks, dtype=torch.int32, device=device).flip(0).view(2, blocks)
    caches = [random(2 * blocks + 1, form.block_size, 2, form.head_dim) for _ in range(2)]
    query, key, value = (random(3, num, num_tokens, form.head_dim) for num in (8, 2, 2))
    places = [torch.tensor(one, dtype=torch.int32, device=device) for one in (row, position)]
    nowhere = torch.full((3, num_tokens), -1, dtype=torch.int32, device=device)
    return (
        query, key, value, *caches, nowhere, *places, table, form.head_dim**-0.5, form.window, 0.0,
        None,
    )  # fmt: skip
