"""Recycled drafting: one drafter, reused; each pass reads the hidden state of the pass before."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.levels import Level
from compilespec.passes.draft_loops.tree import Growth, grow_tree, parents_hidden
from compilespec.passes.graph import emit, find_role, output_node, splice
from compilespec.passes.insert_paged_attention import Branches, page_markers
from compilespec.passes.read_state import place
from compilespec.passes.rows import take_newest
from compilespec.passes.sampling import draft_token
from compilespec.program import markers
from compilespec.tracing.capture import output_widths


def recycled(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splice one pass over the S (or T) rows, a gather of the last committed row, and K-1
    single-token passes.

    Row j of the first pass writes slot seq_len + j; single passes continue from seq_len + n with
    the previous pass's output as hidden state.  Makes the role `drafts` ([B, K], int32).
    Source: requirements M11, A9, A10, E5.
    """
    end, config = output_node(gm), ctx.config
    table = find_role(gm, "block_table_RM")
    metadata = (find_role(gm, "slot"), find_role(gm, "row"), find_role(gm, "position"), table)
    (combined,) = splice(gm, ctx, ctx.draft["combine"], {"aux": find_role(gm, "aux")})
    head_input, recycled = _run(
        gm,
        ctx,
        metadata,
        input_ids=find_role(gm, "draft_ids"),
        position_ids=metadata[2],
        hidden=combined,
    )
    num_passes = 1
    start = next_position(gm, ctx)
    head_row, hidden = take_newest(gm, ctx, head_input, recycled, before=end)
    if config.tree is not None:
        return num_passes + _grow(gm, ctx, head_row, hidden, start)
    head_row = emit(gm, lambda x_B1D: x_B1D.squeeze(1), head_row, before=end)
    drafts = [_propose(gm, ctx, head_row, start, 1)]
    row = emit(
        gm,
        lambda index, live: torch.where(live, index, -1).to(torch.int32),
        find_role(gm, "row_index"),
        find_role(gm, "live"),
        before=end,
    )
    for step in range(1, config.num_draft_tokens):
        ids, position, rows, slot = emit(
            gm,
            next_token,
            drafts[-1],
            start,
            row,
            find_role(gm, "row_index"),
            find_role(gm, "live"),
            table,
            before=end,
            step=step,
            max_seq_len=config.max_seq_len,
            block_size=config.block_size,
        )
        head_input, hidden = _run(
            gm,
            ctx,
            (slot, rows, position, table),
            input_ids=ids,
            position_ids=position,
            hidden=hidden,
        )
        head_row = emit(gm, lambda x_B1D: x_B1D.squeeze(1), head_input, before=end)
        drafts.append(_propose(gm, ctx, head_row, start, step + 1))
        num_passes += 1
    stacked = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=end)
    stacked.meta["role"] = "drafts"
    return num_passes


def next_position(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """The position after the last committed row of each request, [B]."""
    start = find_role(gm, "start")
    if ctx.phase == "prefill":
        return start
    node: fx.Node = emit(
        gm, lambda start_B, count_B: start_B + count_B, start, find_role(gm, "num_emitted"),
        before=output_node(gm),
    )  # fmt: skip
    return node


def _grow(
    gm: fx.GraphModule, ctx: PassContext, head: fx.Node, hidden: fx.Node, start: fx.Node
) -> int:
    """A tree of drafts from the last committed row, whose next one is at `start`."""
    width = output_widths(ctx.draft["forward"])[1]

    def advance(level: Level) -> fx.Node:
        nonlocal hidden
        before = parents_hidden(gm, level, hidden, width)
        ids = emit(gm, lambda ids_BF: ids_BF.clamp(min=0), level.ids, before=output_node(gm))
        head, hidden = _run(
            gm, ctx, level.metadata, level.branches, input_ids=ids,
            position_ids=level.metadata[2], hidden=before,
        )  # fmt: skip
        return head

    drawn = emit(gm, lambda start_B: start_B + 1, start, before=output_node(gm))
    return grow_tree(gm, ctx, head, "head_input", Growth(start, drawn, advance))


def _run(
    gm: fx.GraphModule,
    ctx: PassContext,
    metadata: tuple[fx.Node, ...],
    branches: Branches | None = None,
    **arguments: fx.Node,
) -> tuple[fx.Node, ...]:
    """Splice one drafter pass and give its attention the drafter's caches."""
    outputs = splice(gm, ctx, ctx.draft["forward"], arguments)
    page_markers(gm, ctx, markers(gm), "draft", metadata, branches=branches)  # type: ignore[arg-type]
    return outputs


def _propose(
    gm: fx.GraphModule, ctx: PassContext, head_row: fx.Node, start: fx.Node, number: int
) -> fx.Node:
    """Draft `number`, 1 to K, for position start + number."""
    proposal = splice(gm, ctx, ctx.draft["propose"], {"head_input": head_row})
    return draft_token(gm, ctx, proposal, start, number)


def next_token(
    token_B: Any,
    start_B: Any,
    row_B: Any,
    index_B: Any,
    live_B: Any,
    block_table_RM: Any,
    *,
    step: int,
    max_seq_len: int,
    block_size: int,
) -> tuple[Any, Any, Any, Any]:
    """Inputs of single pass `step`: ids, position, row and slot, all [B, 1]."""
    wanted_B1 = (start_B + (step - 1)).unsqueeze(1)
    position, row, slot = place(
        wanted_B1,
        row_B.unsqueeze(1),
        index_B.unsqueeze(1),
        live_B.unsqueeze(1),
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return token_B.clamp(min=0).unsqueeze(1), position, row, slot
