"""Positions, rows and slots, computed one token at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.passes.references.base import Case, Tokens
from compilespec.program import NUM_KEPT, ProgramConfig


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tokens of a call, and the requests that they belong to."""

    ids: Tensor  # int32, like `tokens`
    tokens: Tokens
    row_index: Tensor  # int64 [B], the state row, or the spare one
    live: Tensor  # bool [B]
    start: Tensor  # int32 [B], the first position that has no token (decode: of this call)
    paths: Sequence[Sequence[Sequence[int]]] = ()  # of a tree, by request: each row's, root first

    def roles(self) -> dict[str, Tensor]:
        """By the roles that passes give to the nodes that compute the same."""
        return {
            "position": self.tokens.position,
            "row": self.tokens.row,
            "slot": self.tokens.slot,
            "row_index": self.row_index,
            "live": self.live,
            "start": self.start,
        }


def place_chain(config: ProgramConfig, case: Case) -> Placement:
    """`place_call` without trees: what follows the accepted path is placed as after a chain."""
    return place_call(dataclasses.replace(config, tree=None), case)


def paths_from_root(parents: Sequence[int]) -> list[list[int]]:
    """The rows from the root, row 0, to each row of a tree."""
    paths = []
    for row in range(len(parents)):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths


def place_call(config: ProgramConfig, case: Case) -> Placement:
    """Read the call's tokens from its inputs.  Source: E5, H-16."""
    inputs, spare = case.inputs, config.max_batch_size
    paths: list[list[list[int]]] = []
    if case.key.kind == "replay":
        return place_replay(config, inputs)
    if case.phase == "decode":
        rows = inputs["row_B"].tolist()
        state_rows = [row if row >= 0 else spare for row in rows]
        start = [int(inputs["seq_len_R"][row]) for row in state_rows]
        ids = [inputs["tokens_RS"][row].tolist()[: config.num_verify_tokens] for row in state_rows]
        wanted = [[begin + j for j in range(config.num_verify_tokens)] for begin in start]
        if config.tree is not None:
            paths = [paths_from_root(inputs["parents_RS"][row].tolist()) for row in state_rows]
            wanted = [
                [begin + len(path) - 1 for path in tree]
                for begin, tree in zip(start, paths, strict=True)
            ]
        token_rows = [[row] * config.num_verify_tokens for row in rows]
    else:
        rows = inputs["commit_row_R"].tolist()
        state_rows = [row if row >= 0 else spare for row in rows]
        position = inputs["position_T"].tolist()
        start = [position[last] + 1 for last in inputs["last_R"].tolist()]
        ids, wanted = [inputs["ids_T"].tolist()], [position]
        token_rows = [inputs["row_T"].tolist()]
    device = inputs["block_table_RM"].device
    return Placement(
        ids=_int32([[max(token, 0) for token in part] for part in ids], device),
        tokens=place_tokens(config, inputs, token_rows, wanted),
        row_index=torch.tensor(state_rows, device=device),
        live=torch.tensor([row >= 0 for row in rows], device=device),
        start=_int32(start, device),
        paths=paths,
    )


def place_replay(config: ProgramConfig, inputs: Mapping[str, Tensor], ahead: int = 0) -> Placement:
    """NUM_KEPT tokens a request, from the first one that its drafter has not seen, each `ahead`
    positions after the one that kept it; those past its backlog are nowhere.
    """
    rows, backlogs = inputs["row_B"].tolist(), inputs["backlog_B"].tolist()
    state_rows = [row if row >= 0 else config.max_batch_size for row in rows]
    start = [
        max(int(inputs["seq_len_R"][row]) - backlog, 0)
        for row, backlog in zip(state_rows, backlogs, strict=True)
    ]
    wanted = [[begin + place for place in range(NUM_KEPT)] for begin in start]
    token_rows = [
        [row if place < backlog else -1 for place in range(NUM_KEPT)]
        for row, backlog in zip(rows, backlogs, strict=True)
    ]
    ids = [
        [int(inputs["kept_ids_RW"][row, position % NUM_KEPT]) for position in positions]
        for row, positions in zip(state_rows, wanted, strict=True)
    ]
    device = inputs["block_table_RM"].device
    return Placement(
        ids=_int32(ids, device),
        tokens=place_tokens(
            config, inputs, token_rows, [[at + ahead for at in positions] for positions in wanted]
        ),
        row_index=torch.tensor(state_rows, device=device),
        live=torch.tensor([row >= 0 for row in rows], device=device),
        start=_int32(start, device),
    )


def place_tokens(
    config: ProgramConfig,
    inputs: Mapping[str, Tensor],
    rows: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
) -> Tokens:
    """Place each token of `rows` (-1: padded), redirected if its position is out of range."""
    table = inputs["block_table_RM"].tolist()
    placed = [
        [_place(config, table, row, position) for row, position in zip(*pair, strict=True)]
        for pair in zip(rows, positions, strict=True)
    ]
    device = inputs["block_table_RM"].device
    position, row, slot = (
        _int32([[token[part] for token in request] for request in placed], device)
        for part in range(3)
    )
    return Tokens(position=position, row=row, slot=slot)


def _place(
    config: ProgramConfig, table: list[list[int]], row: int, position: int
) -> tuple[int, int, int]:
    """(position, row, slot) of one token."""
    if row < 0 or not 0 <= position < config.max_seq_len:
        return 0, -1, -1
    number, offset = divmod(position, config.block_size)
    block = table[row][number]
    return position, row, block * config.block_size + offset if block >= 0 else -1


def _int32(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
