"""Logits after a processor, computed one row at a time by the processor itself."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from compilespec.ops.sample.layout import PROMPT_LEN
from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.passes.references.placement import place_call


def process_logits(before: Before, ctx: PassContext, case: Case) -> Values:
    """Each row's logits from the engine's processor, given the tokens before it.  Processors on the
    host leave the rows of a test case unchanged, in float32 or wider.
    """
    values = before(case.inputs)
    logits, buffers = values.outputs["logits"], dict(values.buffers)
    if ctx.logits_processor is not None:
        logits, context = _processed(ctx, case, logits)
        if "context_BL" in ctx.logits_processor.inputs:
            buffers["processed_RL"] = context
    if ctx.config.features.host_processors:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return dataclasses.replace(
        values,
        outputs={"logits": logits},
        roles={**values.roles, "logits": logits},
        buffers=buffers,
    )


@torch.no_grad()
def _processed(ctx: PassContext, case: Case, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the context rows with this call's tokens."""
    processor, config = ctx.logits_processor, ctx.config
    assert processor is not None
    placed = place_call(config, case)
    unread = torch.zeros(config.max_batch_size + 1, config.max_seq_len, dtype=torch.int32)
    context = case.inputs.get("processed_RL", unread).clone()
    flat = (tensor.flatten().tolist() for tensor in (placed.tokens.row, placed.tokens.position))
    for token, row, position in zip(placed.ids.flatten().tolist(), *flat, strict=True):
        context[row, position] = token  # row -1 is the spare row
    rows, starts = placed.row_index.tolist(), placed.start.tolist()
    decodes = case.phase == "decode"
    made = []
    for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
        for s in range(logits.shape[1] if decodes else 1):
            depth = len(placed.paths[b][s]) - 1 if placed.paths else s
            place = start + depth + int(decodes)  # position of the token that the row chooses
            last = placed.ids[b, s] if decodes else placed.ids[0, case.inputs["last_R"][b]]
            reads = {
                "logits_BSV": logits[b, s] if decodes else logits[0, b],
                "position_BS": torch.tensor(place, dtype=torch.int32),
                "ids_BS": last,
            }
            reads = {name: tensor.reshape(1, 1, *tensor.shape) for name, tensor in reads.items()}
            reads["context_BL"] = context[row : row + 1].clamp(min=0) if row >= 0 else context[-1:]
            reads["prompt_len_B"] = case.inputs["sampling_RI"][row, PROMPT_LEN].reshape(1)
            made.append(processor(**reads).flatten())
    shape = (len(rows), -1, logits.shape[2]) if decodes else (1, len(rows), logits.shape[2])
    return torch.stack(made).reshape(shape), context
