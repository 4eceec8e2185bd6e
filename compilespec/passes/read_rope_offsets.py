"""Reads how far the rotary positions of a step's tokens are from the tokens' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer, add_input, after_placeholders, emit, find_role
from compilespec.program import ROPE_OFFSETS, ROPE_ROWS, BufferSpec, InputSpec, ProgramConfig

OFFSETS_T = ("rope_time_T", "rope_height_T", "rope_width_T")  # of a prefill call's tokens


def read_rope_offsets(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Prefill: what the host gives with each token.  Decode: the one offset that all tokens after
    a request's prompt have, the same of time, height and width, in a state row.

    Returns: 1.  Numerics: exact.  Runs on torch IR.  Source: transformers' Qwen2-VL, `rope_deltas`.
    """
    old = find_role(gm, ROPE_OFFSETS)
    if ctx.phase == "prefill":
        given = [add_input(gm, ctx, InputSpec(name=name, kind="batch")) for name in OFFSETS_T]
        new = emit(gm, prompt_offsets, *given, before=after_placeholders(gm))
    else:
        rows = add_input(gm, ctx, InputSpec(name="row_B", kind="batch"))
        deltas = add_buffer(gm, ctx, rope_deltas(ctx.config))
        spare = ctx.config.max_batch_size
        new = emit(gm, decode_offsets, rows, deltas, before=after_placeholders(gm), spare_row=spare)
    old.replace_all_uses_with(new)
    gm.graph.erase_node(old)
    return 1


def prompt_offsets(*given_T: Any) -> Any:
    """[3, 1, T]."""
    return torch.stack(given_T).unsqueeze(1)


def decode_offsets(row_B: Any, rope_delta_R: Any, *, spare_row: int) -> Any:
    """[3, B, 1], for all rows of a request's window."""
    index_B = torch.where(row_B >= 0, row_B, spare_row).long()
    return rope_delta_R[index_B].unsqueeze(0).unsqueeze(2).expand(ROPE_ROWS, -1, -1)


def rope_deltas(config: ProgramConfig) -> BufferSpec:
    """What is added to the positions of the tokens after each row's prompt."""
    shape = (config.max_batch_size + 1,)
    return BufferSpec(
        name="rope_delta_R", kind="state", shape=shape, dtype=torch.int32, by_host=True
    )
