"""What steps of K = 0 must keep for the drafter, and a replay make of it, one request at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.passes.references.placement import Placement, place_call, place_replay
from compilespec.program import NUM_KEPT, PAD


def keep_step(placed: Placement, values: Values, buffers: Mapping[str, Tensor]) -> None:
    """Write each request's next token, and its hidden state if there is a ring for it."""
    for request, row in enumerate(placed.row_index.tolist()):
        column = int(placed.start[request]) % NUM_KEPT
        buffers["kept_ids_RW"][row, column] = values.roles["target"][request, 0].clamp(min=0)
        if "kept_aux_RWE" in buffers:
            buffers["kept_aux_RWE"][row, column] = values.roles["aux"][request, 0]


def read_kept(before: Before, ctx: PassContext, case: Case) -> Values:
    """The inputs that steps of K = 0 kept, from the first position of each request's backlog on."""
    values, placed = before(case.inputs), place_call(ctx.config, case)
    rings = {"draft_ids": "kept_ids_RW"}
    if "combine" in ctx.draft:
        rings["aux"] = "kept_aux_RWE"
    else:  # token t+1 has its own slot
        placed = place_replay(ctx.config, case.inputs, ahead=1)
    made: dict[str, list[Tensor]] = {role: [] for role in rings}
    for request, row in enumerate(placed.row_index.tolist()):
        start = int(placed.start[request])
        columns = [(start + place) % NUM_KEPT for place in range(NUM_KEPT)]
        for role, ring in rings.items():
            made[role].append(torch.stack([case.inputs[ring][row, column] for column in columns]))
    counts = [min(max(backlog, 1), NUM_KEPT) for backlog in case.inputs["backlog_B"].tolist()]
    roles = {
        **{role: torch.stack(rows) for role, rows in made.items()},
        **placed.roles(),
        "num_emitted": torch.tensor(counts, dtype=torch.int32, device=placed.start.device),
    }
    kept = {name: case.inputs[name].clone() for name in rings.values()}
    return dataclasses.replace(
        values, roles={**values.roles, **roles}, buffers={**values.buffers, **kept}
    )


def commit_drafts(before: Before, ctx: PassContext, case: Case) -> Values:
    """Each row keeps its last token, and has the new drafts after it; lengths stay."""
    values, placed = before(case.inputs), place_call(ctx.config, case)
    tokens_RS = case.inputs["tokens_RS"].clone()
    rows: list[Tensor] = []
    for request, row in enumerate(placed.row_index.tolist()):
        last = case.inputs["tokens_RS"][row, :1]
        drafts = values.roles["drafts"][request].to(last.dtype)
        there = case.inputs["tokens_RS"][row, 1:]
        if ctx.capabilities.combines and int(there[0]) != PAD:  # found by a look-up
            drafts = there
        rows.append(torch.cat([last, drafts]))
        if placed.live[request]:
            tokens_RS[row] = rows[-1]
    return dataclasses.replace(
        values,
        outputs={"tokens_BS": torch.stack(rows)},
        buffers={**values.buffers, "tokens_RS": tokens_RS},
    )


__all__ = ["commit_drafts", "keep_step", "read_kept"]
