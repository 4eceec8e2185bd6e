"""Reads the positions, slots and ids of a step from the state buffers, not from the caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import (
    add_buffer,
    add_input,
    after_placeholders,
    arange_like,
    emit,
    find_role,
)
from compilespec.passes.trees import follow_parents, parent_rows, verifies_tree
from compilespec.program import BufferSpec, InputSpec, ProgramConfig


def read_state(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replace the target's ids and positions by reads of the state rows; name the attention
    metadata.

    Roles made: `ids`, `position`, `row`, `slot` (all [B, S] or [1, T], int32), `row_index` (state
    row per request, the spare row where padded), `live` and `start` (next position to draft from,
    prefill: after the last token).  Of a tree also `depth` ([B, S]) and `path` ([B, S, P]); the
    positions of its nodes are by depth.  Positions at or past the maximum length are redirected:
    position 0, slot -1, row -1 (E5).
    Numerics: exact.  Runs on torch IR.
    """
    config = ctx.config
    tables, tokens, lengths = (
        add_buffer(gm, ctx, spec(config)) for spec in (block_table, token_rows, lengths_of_rows)
    )
    old_ids, old_positions = find_role(gm, "input_ids"), find_role(gm, "position_ids")
    if ctx.phase == "decode":
        rows = add_input(gm, ctx, InputSpec(name="row_B", kind="batch"))
        nodes = _read_topology(gm, ctx, rows) if verifies_tree(ctx) else ()
        made = emit(
            gm,
            read_decode_state,
            rows,
            tokens,
            lengths,
            tables,
            *nodes[:1],
            before=after_placeholders(gm) if not nodes else nodes[-1].next,
            num_tokens=config.num_verify_tokens,
            row_tokens=config.num_row_tokens,
            max_seq_len=config.max_seq_len,
            block_size=config.block_size,
            spare_row=config.max_batch_size,
        )
    else:
        ids, positions, rows, owners, commit, last = (
            add_input(gm, ctx, InputSpec(name=name, kind="batch"))
            for name in ("ids_T", "position_T", "row_T", "owner_T", "commit_row_R", "last_R")
        )
        del owners  # read by shift_hidden_states
        made = emit(
            gm,
            read_prefill_batch,
            ids,
            positions,
            rows,
            commit,
            last,
            tables,
            before=after_placeholders(gm),
            max_seq_len=config.max_seq_len,
            block_size=config.block_size,
            spare_row=config.max_batch_size,
        )
    for role, node in zip(
        ("ids", "position", "row", "slot", "row_index", "live", "start"), made, strict=True
    ):
        node.meta["role"] = role
    for old, role in ((old_ids, "ids"), (old_positions, "position")):
        old.replace_all_uses_with(find_role(gm, role))
        gm.graph.erase_node(old)
    return 2


def _read_topology(gm: fx.GraphModule, ctx: PassContext, rows: fx.Node) -> tuple[fx.Node, ...]:
    """Make the roles `depth` and `path` of a tree's rows."""
    config = ctx.config
    parents = add_buffer(gm, ctx, parent_rows(config))
    depth, path = emit(
        gm, read_parents, rows, parents, before=after_placeholders(gm),
        spare_row=config.max_batch_size, num_tokens=config.num_verify_tokens,
        max_depth=config.num_draft_tokens,
    )  # fmt: skip
    depth.meta["role"], path.meta["role"] = "depth", "path"
    return depth, path


def read_parents(
    row_B: Any, parents_RS: Any, *, spare_row: int, num_tokens: int, max_depth: int
) -> tuple[Any, Any]:
    """Depths and paths of each request's tree: see `follow_parents`."""
    index_B = torch.where(row_B >= 0, row_B, spare_row).long()
    return follow_parents(parents_RS[index_B], num_tokens=num_tokens, max_depth=max_depth)


def block_table(config: ProgramConfig) -> BufferSpec:
    """The blocks of each row's request, in order; -1 after them."""
    return BufferSpec(
        name="block_table_RM",
        kind="state",
        shape=(config.max_batch_size + 1, config.blocks_per_row),  # the last row is spare
        dtype=torch.int32,
        fill=-1,
        by_host=True,
    )


def token_rows(config: ProgramConfig) -> BufferSpec:
    """The last emitted token of each row's request, and its drafts."""
    shape = (config.max_batch_size + 1, config.num_row_tokens)
    return BufferSpec(name="tokens_RS", kind="state", shape=shape, dtype=torch.int32)


def lengths_of_rows(config: ProgramConfig) -> BufferSpec:
    """Committed tokens of each row's request."""
    shape = (config.max_batch_size + 1,)
    return BufferSpec(name="seq_len_R", kind="state", shape=shape, dtype=torch.int32)


def read_decode_state(
    row_B: Any,
    tokens_RS: Any,
    seq_len_R: Any,
    block_table_RM: Any,
    depth_BS: Any = None,
    *,
    num_tokens: int,
    row_tokens: int,
    max_seq_len: int,
    block_size: int,
    spare_row: int,
) -> tuple[Any, ...]:
    """Decode: row b's S tokens sit at positions seq_len .. seq_len + K, those of a tree by depth;
    padded rows (-1) read the spare row.
    """
    live_B = row_B >= 0
    index_B = torch.where(live_B, row_B, spare_row).long()
    ids_BS = first_columns(tokens_RS[index_B], num_tokens, row_tokens).clamp(min=0)
    start_B = seq_len_R[index_B]
    ahead = arange_like(row_B, num_tokens) if depth_BS is None else depth_BS
    wanted_BS = start_B.unsqueeze(1) + ahead
    position_BS, row_BS, slot_BS = place(
        wanted_BS,
        row_B.unsqueeze(1),
        index_B.unsqueeze(1),
        live_B.unsqueeze(1),
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return ids_BS, position_BS, row_BS, slot_BS, index_B, live_B, start_B


def first_columns(rows: Any, wanted: int, there: int) -> Any:
    """The first `wanted` columns: a step of a smaller K reads fewer."""
    return rows if wanted == there else rows[:, :wanted]


def read_prefill_batch(
    ids_T: Any,
    position_T: Any,
    row_T: Any,
    commit_row_R: Any,
    last_R: Any,
    block_table_RM: Any,
    *,
    max_seq_len: int,
    block_size: int,
    spare_row: int,
) -> tuple[Any, ...]:
    """Prefill: T packed prompt tokens; a request commits its row only when its prompt ends
    (commit_row_R >= 0).
    """
    index_1T = torch.where(row_T >= 0, row_T, spare_row).long().unsqueeze(0)
    position_1T, row_1T, slot_1T = place(
        position_T.unsqueeze(0),
        row_T.unsqueeze(0),
        index_1T,
        (row_T >= 0).unsqueeze(0),
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    live_R = commit_row_R >= 0
    index_R = torch.where(live_R, commit_row_R, spare_row).long()
    start_R = position_T[last_R.long()] + 1
    return ids_T.clamp(min=0).unsqueeze(0), position_1T, row_1T, slot_1T, index_R, live_R, start_R


def place(
    wanted: Any,
    row: Any,
    index: Any,
    live: Any,
    block_table_RM: Any,
    *,
    max_seq_len: int,
    block_size: int,
) -> tuple[Any, Any, Any]:
    """Attention metadata (position, row, slot) of tokens at the `wanted` positions, redirected if
    those are out of range.

    Args:
        wanted: int32 positions, [B, S]; row: state rows, int32, -1 = padded; index: the same with
        the spare row for padded ones, int64; live: bool; all broadcastable to `wanted`.
    """
    inside = live & (wanted < max_seq_len)
    position = torch.where(inside, wanted, 0)
    block = block_table_RM[index, (position // block_size).long()]
    slot = torch.where(inside & (block >= 0), block * block_size + position % block_size, -1)
    return position, torch.where(inside, row, -1), slot
