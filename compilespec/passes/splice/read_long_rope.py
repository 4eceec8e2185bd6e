"""Reads which tokens of a step have the rotary table of long requests."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.graph.nodes import find_role
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.program import LONG_ROPE, BufferSpec, ProgramConfig


def read_long_rope(step: Splice) -> int:
    """Replace the target's argument by a state row, which says it for all tokens of a request.

    Returns: 1.  Numerics: exact.  Runs on torch IR.
    """
    old, row = find_role(step.gm, LONG_ROPE), step.roles.row
    state = step.buffer(long_rope_rows(step.config))
    with step.after(row):
        new = step.call(read_lengths, row, state)
    old.replace_all_uses_with(node_of(new))
    step.graph.erase_node(old)
    return 1


def read_lengths(row_BS: Tensor, long_rope_R: Tensor, *, spare_row: int) -> Tensor:
    """Bool [B, S]."""
    return long_rope_R[torch.where(row_BS >= 0, row_BS, spare_row).long()] > 0


def long_rope_rows(config: ProgramConfig) -> BufferSpec:
    """1 where a row's request may grow longer than the short rotary table serves."""
    return BufferSpec(
        name="long_rope_R", kind="state", shape=(config.num_rows,), dtype=torch.int32, by_host=True
    )
