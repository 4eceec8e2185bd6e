"""Reads which tokens of a step have the rotary table of long requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer, emit, find_role
from compilespec.program import LONG_ROPE, BufferSpec, ProgramConfig


def read_long_rope(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replace the target's argument by a state row, which says it for all tokens of a request.

    Returns: 1.  Numerics: exact.  Runs on torch IR.
    """
    old, row = find_role(gm, LONG_ROPE), find_role(gm, "row")
    state = add_buffer(gm, ctx, long_rope_rows(ctx.config))
    spare = ctx.config.max_batch_size
    new = emit(gm, read_lengths, row, state, before=row.next, spare_row=spare)
    old.replace_all_uses_with(new)
    gm.graph.erase_node(old)
    return 1


def read_lengths(row_BS: Any, long_rope_R: Any, *, spare_row: int) -> Any:
    """Bool [B, S]."""
    return long_rope_R[torch.where(row_BS >= 0, row_BS, spare_row).long()] > 0


def long_rope_rows(config: ProgramConfig) -> BufferSpec:
    """1 where a row's request may grow longer than the short rotary table serves."""
    shape = (config.max_batch_size + 1,)
    return BufferSpec(
        name="long_rope_R", kind="state", shape=shape, dtype=torch.int32, by_host=True
    )
