"""Reference of the pass that reads rotary offsets: a token at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.passes.references.placement import place_call
from compilespec.program import ROPE_OFFSETS


def read_rope_offsets(before: Before, ctx: PassContext, case: Case) -> Values:
    """The graph before, with the offsets that plain Python reads."""
    return before({**case.inputs, **rope_offsets(ctx, case)})


def rope_offsets(ctx: PassContext, case: Case) -> Mapping[str, Tensor]:
    """The target's argument, of a target that has it."""
    if not ctx.target.has_rope_offsets or case.key.kind == "replay":
        return {}
    ids, inputs = place_call(ctx.config, case).ids, case.inputs
    offsets = torch.zeros((3, *ids.shape), dtype=torch.int32, device=ids.device)
    if case.phase == "prefill":
        for axis, name in enumerate(("rope_time_T", "rope_height_T", "rope_width_T")):
            offsets[axis, 0] = inputs[name]
    else:
        for place, row in enumerate(inputs["row_B"].tolist()):
            offsets[:, place] = int(inputs["rope_delta_R"][row])  # -1: the spare row, the last
    return {ROPE_OFFSETS: offsets}
