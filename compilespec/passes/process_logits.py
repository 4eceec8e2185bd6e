"""Changes logits before sampling: a processor traced into the step, and processors on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import compilespec.ops.host_process  # noqa: F401  (registers the operator)
from compilespec.ops.sample.layout import PROMPT_LEN
from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer, emit, find_role, output_node, set_outputs, splice
from compilespec.passes.sampling import drawn_positions, sampling_state
from compilespec.passes.trees import verifies_tree
from compilespec.program import PAD, BufferSpec
from compilespec.tracing.capture import output_widths


def num_processors(ctx: PassContext) -> int | None:
    """The number of processors to splice; None if there is none."""
    return (ctx.logits_processor is not None) + ctx.config.features.host_processors or None


def process_logits(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replace the logits that acceptance reads by the output of the engine's processor, then of the
    processors of single requests on the host.

    Roles made: `logits` moves to the result; `raw_logits` marks the original, for
    log-probabilities.
    Numerics: rounding.  Torch IR.
    """
    raw, end = find_role(gm, "logits"), output_node(gm)
    logits = raw
    if ctx.phase == "prefill":  # [1, R, V]: every request's last row
        logits = emit(gm, lambda x_1RV: x_1RV.squeeze(0).unsqueeze(1), raw, before=end)
    if ctx.logits_processor is not None:
        traced = ctx.logits_processor.capture(ctx.phase, ctx.config, *output_widths(ctx.target))
        known: dict[str, Callable[[], Any]] = {
            "logits_BSV": lambda: logits,
            "position_BS": lambda: _positions(gm, ctx),
            "ids_BS": lambda: _last_tokens(gm, ctx),
            "context_BL": lambda: _context(gm, ctx),
            "prompt_len_B": lambda: _prompt_lengths(gm, ctx),
        }
        reads = [entry.name for entry in traced.inputs if entry.kind == "argument"]
        (logits,) = splice(gm, ctx, traced, {name: known[name]() for name in reads})
    if ctx.config.features.host_processors:
        handles = _handles(gm, ctx)
        path = (find_role(gm, "path"),) if verifies_tree(ctx) else ()
        arguments = (logits, _last_tokens(gm, ctx), find_role(gm, "row_index"), handles, *path)
        with gm.graph.inserting_before(end):
            logits = gm.graph.call_function(torch.ops.compilespec.host_process.default, arguments)
    if ctx.phase == "prefill":
        logits = emit(gm, lambda x_R1V: x_R1V.squeeze(1).unsqueeze(0), logits, before=end)
    raw.meta["role"], logits.meta["role"] = "raw_logits", "logits"
    set_outputs(gm, {"logits": logits})
    return num_processors(ctx) or 0


def _positions(gm: fx.GraphModule, ctx: PassContext) -> Any:
    start, end = find_role(gm, "start"), output_node(gm)
    if ctx.phase == "prefill":
        return emit(gm, lambda start_R: start_R.unsqueeze(1), start, before=end)
    depth = (find_role(gm, "depth"),) if verifies_tree(ctx) else ()
    return emit(
        gm, drawn_positions, start, *depth, before=end, num_tokens=ctx.config.num_verify_tokens
    )


def _last_tokens(gm: fx.GraphModule, ctx: PassContext) -> Any:
    """The token before the one that each row chooses, [B, S]; in prefill the prompt's last."""
    ids = find_role(gm, "ids")
    if ctx.phase == "decode":
        return ids
    return emit(
        gm, lambda ids_1T, last_R: ids_1T.squeeze(0)[last_R.long()].unsqueeze(1), ids,
        find_role(gm, "last_R"), before=output_node(gm),
    )  # fmt: skip


def _prompt_lengths(gm: fx.GraphModule, ctx: PassContext) -> Any:
    _, words, *_ = sampling_state(gm, ctx)
    return emit(
        gm, lambda words_RI, index_B: words_RI[index_B][:, PROMPT_LEN], words,
        find_role(gm, "row_index"), before=output_node(gm),
    )  # fmt: skip


def _context(gm: fx.GraphModule, ctx: PassContext) -> Any:
    """Write the call's tokens into the context rows and read those of its requests."""
    config, end = ctx.config, output_node(gm)
    buffer = BufferSpec(
        name="processed_RL", kind="state", shape=(config.max_batch_size + 1, config.max_seq_len),
        dtype=torch.int32, fill=PAD,
    )  # fmt: skip
    context = add_buffer(gm, ctx, buffer)
    places = (find_role(gm, name) for name in ("ids", "position", "row"))
    return emit(
        gm, write_and_read, context, *places, find_role(gm, "row_index"), before=end,
        spare_row=config.max_batch_size,
    )  # fmt: skip


def write_and_read(
    context_RL: Any, ids: Any, position: Any, row: Any, index_B: Any, *, spare_row: int
) -> Any:
    """The rows of a call's requests, [B, L], with its tokens at their positions; -1 reads as 0."""
    row = torch.where(row >= 0, row, spare_row).long()
    context_RL.index_put_((row, position.long()), ids)
    return context_RL[index_B].clamp(min=0)


def _handles(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    rows = ctx.config.max_batch_size + 1
    buffer = BufferSpec(
        name="processor_R", kind="state", shape=(rows,), dtype=torch.int64, by_host=True
    )
    return add_buffer(gm, ctx, buffer)
