"""Outputs the tapped hidden states, for a reader on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import emit, find_role, get_outputs, output_node, set_outputs


def output_hidden_states(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Add an output, the taps concatenated in order: `hidden_BSE` of the step's tokens, in prefill
    `hidden_1TE` of the packed ones.  Numerics: exact.  Torch IR.
    """

    def side_by_side(*parts: Any) -> Any:
        return torch.cat(parts, -1)

    taps = [find_role(gm, f"aux.{index}") for index in range(len(ctx.aux_layers))]
    hidden = emit(gm, side_by_side, *taps, before=output_node(gm))
    hidden.meta["role"] = "hidden"
    name = "hidden_BSE" if ctx.phase == "decode" else "hidden_1TE"
    set_outputs(gm, {**get_outputs(gm), name: hidden})
    return 1
