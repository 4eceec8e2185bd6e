"""Reads the positions, slots and ids of a step from the state buffers, not from the caller."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice, arange_like, node_of
from compilespec.passes.splice.places import place, place_rows
from compilespec.passes.splice.trees import follow_parents, parent_rows, verifies_tree
from compilespec.program import BufferSpec, ProgramConfig

MADE = ("ids", "position", "row", "slot", "row_index", "live", "start")


def read_state(step: Splice) -> int:
    """Replace the target's ids and positions by reads of the state rows; name the attention
    metadata.

    Roles made: `ids`, `position`, `row`, `slot` (all [B, S] or [1, T], int32), `row_index` (state
    row per request, the spare row where padded), `live` and `start` (next position to draft from,
    prefill: after the last token).  Of a tree also `depth` ([B, S]) and `path` ([B, S, P]); the
    positions of its nodes are by depth.  Positions at or past the maximum length are redirected:
    position 0, slot -1, row -1 (E5).
    Numerics: exact.  Runs on torch IR.
    """
    for spec in (block_table, token_rows, lengths_of_rows):
        step.buffer(spec(step.config))
    old = {"ids": step.roles.input_ids, "position": step.roles.position_ids}
    made = _decode(step) if step.is_decode else _prefill(step)
    for role, value in zip(MADE, made, strict=True):
        step.name(role, value)
    for role, value in old.items():
        node_of(value).replace_all_uses_with(node_of(step.role(role)))
        step.graph.erase_node(node_of(value))
    return 2


def _decode(step: Splice) -> tuple[Tensor, ...]:
    roles, rows, depth = step.roles, step.batch("row_B"), None
    parents = step.buffer(parent_rows(step.config)) if verifies_tree(step.ctx) else None
    with step.at_start():
        if parents is not None:
            depth, path = step.call(
                read_parents, rows, parents, max_depth=step.config.num_draft_tokens
            )
            roles.depth, roles.path = depth, path
        return step.call(
            read_decode_state, rows, roles.tokens_RS, roles.seq_len_R, roles.block_table_RM, depth
        )


def _prefill(step: Splice) -> tuple[Tensor, ...]:
    ids, positions, rows, _, commit, last = (
        step.batch(name)  # the owners are read by shift_hidden_states
        for name in ("ids_T", "position_T", "row_T", "owner_T", "commit_row_R", "last_R")
    )
    with step.at_start():
        return step.call(
            read_prefill_batch, ids, positions, rows, commit, last, step.roles.block_table_RM
        )


def read_parents(
    row_B: Tensor, parents_RS: Tensor, *, spare_row: int, num_verify_tokens: int, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Depths and paths of each request's tree: see `follow_parents`."""
    index_B = torch.where(row_B >= 0, row_B, spare_row).long()
    return follow_parents(parents_RS[index_B], num_tokens=num_verify_tokens, max_depth=max_depth)


def block_table(config: ProgramConfig) -> BufferSpec:
    """The blocks of each row's request, in order; -1 after them."""
    return BufferSpec(
        name="block_table_RM",
        kind="state",
        shape=(config.num_rows, config.blocks_per_row),
        dtype=torch.int32,
        fill=-1,
        by_host=True,
    )


def token_rows(config: ProgramConfig) -> BufferSpec:
    """The last emitted token of each row's request, and its drafts."""
    shape = (config.num_rows, config.num_row_tokens)
    return BufferSpec(name="tokens_RS", kind="state", shape=shape, dtype=torch.int32)


def lengths_of_rows(config: ProgramConfig) -> BufferSpec:
    """Committed tokens of each row's request."""
    shape = (config.num_rows,)
    return BufferSpec(name="seq_len_R", kind="state", shape=shape, dtype=torch.int32)


def read_decode_state(
    row_B: Tensor,
    tokens_RS: Tensor,
    seq_len_R: Tensor,
    block_table_RM: Tensor,
    depth_BS: Tensor | None = None,
    *,
    num_verify_tokens: int,
    num_row_tokens: int,
    max_seq_len: int,
    block_size: int,
    spare_row: int,
) -> tuple[Tensor, ...]:
    """Decode: row b's S tokens sit at positions seq_len .. seq_len + K, those of a tree by depth;
    padded rows (-1) read the spare row.
    """
    live_B = row_B >= 0
    index_B = torch.where(live_B, row_B, spare_row).long()
    tokens_BS = first_columns(tokens_RS[index_B], num_verify_tokens, num_row_tokens)
    ids_BS = tokens_BS.clamp(min=0)
    start_B = seq_len_R[index_B]
    ahead = arange_like(row_B, num_verify_tokens) if depth_BS is None else depth_BS
    wanted_BS = start_B.unsqueeze(1) + ahead
    position_BS, row_BS, slot_BS = place_rows(
        wanted_BS,
        row_B,
        index_B,
        live_B,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return ids_BS, position_BS, row_BS, slot_BS, index_B, live_B, start_B


def first_columns(rows: Tensor, wanted: int, there: int) -> Tensor:
    """The first `wanted` columns: a step of a smaller K reads fewer."""
    return rows if wanted == there else rows[:, :wanted]


def read_prefill_batch(
    ids_T: Tensor,
    position_T: Tensor,
    row_T: Tensor,
    commit_row_R: Tensor,
    last_R: Tensor,
    block_table_RM: Tensor,
    *,
    max_seq_len: int,
    block_size: int,
    spare_row: int,
) -> tuple[Tensor, ...]:
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
