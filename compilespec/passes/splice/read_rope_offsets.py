"""Reads how far the rotary positions of a step's tokens are from the tokens' own."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.graph.nodes import find_role
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.program import ROPE_OFFSETS, ROPE_ROWS, BufferSpec, ProgramConfig

OFFSETS_T = ("rope_time_T", "rope_height_T", "rope_width_T")  # of a prefill call's tokens


def read_rope_offsets(step: Splice) -> int:
    """Prefill: what the host gives with each token.  Decode: the one offset that all tokens after
    a request's prompt have, the same of time, height and width, in a state row.

    Returns: 1.  Numerics: exact.  Runs on torch IR.  Source: transformers' Qwen2-VL, `rope_deltas`.
    """
    old = find_role(step.gm, ROPE_OFFSETS)
    if step.is_decode:
        rows, deltas = step.batch("row_B"), step.buffer(rope_deltas(step.config))
        with step.at_start():
            new = step.call(decode_offsets, rows, deltas)
    else:
        given = [step.batch(name) for name in OFFSETS_T]
        with step.at_start():
            new = prompt_offsets(*given)
    old.replace_all_uses_with(node_of(new))
    step.graph.erase_node(old)
    return 1


def prompt_offsets(*given_T: Tensor) -> Tensor:
    """[3, 1, T]."""
    return torch.stack(given_T).unsqueeze(1)


def decode_offsets(row_B: Tensor, rope_delta_R: Tensor, *, spare_row: int) -> Tensor:
    """[3, B, 1], for all rows of a request's window."""
    index_B = torch.where(row_B >= 0, row_B, spare_row).long()
    return rope_delta_R[index_B].unsqueeze(0).unsqueeze(2).expand(ROPE_ROWS, -1, -1)


def rope_deltas(config: ProgramConfig) -> BufferSpec:
    """What is added to the positions of the tokens after each row's prompt."""
    shape = (config.num_rows,)
    return BufferSpec(
        name="rope_delta_R", kind="state", shape=shape, dtype=torch.int32, by_host=True
    )
