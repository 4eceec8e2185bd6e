"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import random

import pytest
import torch

from compilespec.errors import PassError
from compilespec.passes.graph.nodes import find_role
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.calls import next_token
from compilespec.passes.splice.read_state import place, read_decode_state, read_state
from tests.support.hand_graphs import call
from tests.support.steps import CONFIG, NUM_DRAFT_TOKENS, emitted_graph, started
from tests.support.untouched import check_left_alone, step


def test_read_state_replaces_ids_and_positions(parts):
    gm, ctx = started(parts, "decode", "read_state")
    assert read_state(Splice(gm, ctx)) == 2
    roles = [node.meta["role"] for node in gm.graph.nodes if node.op == "placeholder"]
    assert not {"input_ids", "position_ids"} & set(roles)
    assert {"row_B", "tokens_RS", "seq_len_R", "block_table_RM"} <= set(roles)
    for role in ("ids", "position", "row", "slot", "row_index", "live", "start"):
        assert find_role(gm, role)
    assert ctx.buffers["tokens_RS"].shape == (CONFIG.max_batch_size + 1, NUM_DRAFT_TOKENS + 1)
    assert ctx.buffers["block_table_RM"].fill == -1
    assert all(spec.dtype == torch.int32 for spec in ctx.buffers.values())
    with pytest.raises(PassError, match="input_ids"):
        read_state(Splice(gm, ctx))  # a graph whose ids come from the state already


def place_oracle(
    position: int, row: int, table: list[list[int]], limit: int, block: int
) -> tuple[int, int, int]:
    """(position, row, slot) of one token, from the words of E5 and H-16."""
    if row < 0 or position >= limit:
        return 0, -1, -1
    entry = table[row][position // block]
    return position, row, entry * block + position % block if entry >= 0 else -1


def test_decode_positions_and_slots_equal_a_scalar_oracle():
    """Past the maximum length, padded rows, blocks that are not allocated, tables of any order."""
    rng = random.Random(0)
    for _ in range(60):
        block, limit = rng.choice([1, 3, 4, 16]), rng.randint(1, 37)
        num_rows, num_tokens = rng.randint(1, 5), rng.randint(1, 9)
        width = -(-limit // block)
        table = [
            [rng.choice([-1, rng.randrange(50)]) for _ in range(width)] for _ in range(num_rows)
        ]
        table.append([-1] * width)  # the spare row
        lengths = [
            rng.choice([0, limit - 1, limit, rng.randint(0, limit)]) for _ in range(num_rows + 1)
        ]
        tokens = [[rng.randint(-1, 99) for _ in range(num_tokens)] for _ in range(num_rows + 1)]
        rows = rng.sample(range(num_rows), rng.randint(0, num_rows)) + [-1] * rng.randint(0, 3)
        if not rows:
            continue
        rng.shuffle(rows)
        gm = emitted_graph(
            read_decode_state, ["row", "tokens", "length", "table"], num_verify_tokens=num_tokens,
            num_row_tokens=num_tokens, max_seq_len=limit, block_size=block, spare_row=num_rows,
        )  # fmt: skip
        batch = [torch.tensor(x, dtype=torch.int32) for x in (rows, tokens, lengths, table)]
        ids, position, row, slot, index, live, start = call(gm, *batch)
        assert [part.dtype for part in (ids, position, row, slot, start)] == [torch.int32] * 5
        assert live.tolist() == [r >= 0 for r in rows]
        assert index.tolist() == [r if r >= 0 else num_rows for r in rows]
        assert start.tolist() == [lengths[r] for r in rows]
        for b, r in enumerate(rows):
            assert ids[b].tolist() == [max(0, token) for token in tokens[r]]
            for j in range(num_tokens):
                want = place_oracle(lengths[r] + j, r, table, limit, block)
                assert (position[b, j].item(), row[b, j].item(), slot[b, j].item()) == want


def test_single_passes_go_where_the_oracle_says():
    """`next_token`: ids clamped, step t at start + t - 1, redirected like all others."""
    table = [[2, 0, -1], [1, 4, 3], [-1, -1, -1]]
    start, limit, block = [3, 9], 11, 4
    for number in (1, 2, 3, 4):
        gm = emitted_graph(
            next_token, ["token", "start", "row", "index", "live", "table"], number=number,
            max_seq_len=limit, block_size=block,
        )  # fmt: skip
        for rows in ([0, 1], [-1, 1], [1, 0]):
            live = torch.tensor([r >= 0 for r in rows])
            index = torch.tensor([r if r >= 0 else 2 for r in rows])
            begin = torch.tensor([start[r] if r >= 0 else 0 for r in rows], dtype=torch.int32)
            token = torch.tensor([7, -1], dtype=torch.int32)
            row_B = torch.tensor(rows, dtype=torch.int32)
            ids, position, row, slot = call(
                gm, token, begin, row_B, index, live, torch.tensor(table, dtype=torch.int32)
            )
            assert ids.tolist() == [[7], [0]]
            for b, r in enumerate(rows):
                want = place_oracle(int(begin[b]) + number - 1, r, table, limit, block)
                assert (position[b, 0].item(), row[b, 0].item(), slot[b, 0].item()) == want


def test_place_reads_no_block_past_the_table():
    """The position is redirected before the table is read: an index past it would be an error."""
    wanted = torch.tensor([[100, 3]], dtype=torch.int32)
    row = torch.zeros(1, 1, dtype=torch.int32)
    position, row, slot = place(
        wanted,
        row,
        row.long(),
        row >= 0,
        torch.tensor([[5]], dtype=torch.int32),
        max_seq_len=4,
        block_size=4,
    )
    assert (position.tolist(), row.tolist(), slot.tolist()) == ([[0, 3]], [[-1, 0]], [[-1, 23]])


def test_ids_that_come_from_the_state_already_are_refused() -> None:
    check_left_alone("read_state", step("decode", "read_state"), is_refused=True)
