"""References of the passes that read rotary positions and tables: a token at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.passes.references.placement import place_call
from compilespec.program import LONG_ROPE, ROPE_OFFSETS


def read_rope_offsets(before: Before, ctx: PassContext, case: Case) -> Values:
    """The graph before, with the offsets that plain Python reads."""
    return before({**case.inputs, **_offsets(ctx, case)})


def read_long_rope(before: Before, ctx: PassContext, case: Case) -> Values:
    """The graph before, with the lengths that plain Python reads."""
    return before({**case.inputs, **_lengths(ctx, case)})


def rope_arguments(ctx: PassContext, case: Case) -> Mapping[str, Tensor]:
    """The target's arguments beside ids and positions, of a target that has them."""
    if case.key.kind == "replay":
        return {}
    found: dict[str, Tensor] = {}
    if ctx.target.has_rope_offsets:
        found |= _offsets(ctx, case)
    if ctx.target.has_long_rope:
        found |= _lengths(ctx, case)
    return found


def _offsets(ctx: PassContext, case: Case) -> Mapping[str, Tensor]:
    ids, inputs = place_call(ctx.config, case).ids, case.inputs
    offsets = torch.zeros((3, *ids.shape), dtype=torch.int32, device=ids.device)
    if case.phase == "prefill":
        for axis, name in enumerate(("rope_time_T", "rope_height_T", "rope_width_T")):
            offsets[axis, 0] = inputs[name]
    else:
        for place, row in enumerate(inputs["row_B"].tolist()):
            offsets[:, place] = int(inputs["rope_delta_R"][row])  # -1: the spare row, the last
    return {ROPE_OFFSETS: offsets}


def _lengths(ctx: PassContext, case: Case) -> Mapping[str, Tensor]:
    rows = place_call(ctx.config, case).tokens.row
    is_long = [
        [int(case.inputs["long_rope_R"][row]) == 1 for row in line] for line in rows.tolist()
    ]
    return {LONG_ROPE: torch.tensor(is_long, device=rows.device)}
