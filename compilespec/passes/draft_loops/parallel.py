"""Parallel drafting: one pass of the drafter gives all K drafts, whose later rows hold a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.recycled import next_position
from compilespec.passes.graph import arange_like, emit, find_role, output_node, splice
from compilespec.passes.insert_paged_attention import Branches, page_markers
from compilespec.passes.kv_groups import Metadata
from compilespec.passes.read_state import place
from compilespec.passes.rows import take_newest
from compilespec.passes.sampling import draft_token
from compilespec.program import markers
from compilespec.tracing.capture import output_widths


def parallel(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Decode: one pass over K-1 masked rows, which follow the last committed one, and the S rows.
    Prefill: one over the T rows, and one over the masked rows of each request.

    A masked row sees the committed rows in the caches and, by a path, the masked rows before it;
    it writes nothing, so that the next step finds true rows alone.  Makes the role `drafts` ([B,
    K], int32).  Source: requirement S8; Hui et al. 2026 (P-EAGLE).
    """
    start = next_position(gm, ctx)
    num_masked = ctx.config.num_draft_tokens - 1
    if ctx.phase == "decode":
        head, num_passes = _one_pass(gm, ctx, start, num_masked), 1
    else:
        head, num_passes = _prompt_passes(gm, ctx, start, num_masked), 1 + (num_masked > 0)
    drafts = propose_all(gm, ctx, head, start, ctx.config.num_draft_tokens)
    drafts.meta["role"] = "drafts"
    return num_passes


def num_parallel_passes(ctx: PassContext) -> int:
    """Passes of the drafter that `parallel` splices."""
    return 1 if ctx.phase == "decode" or ctx.config.num_draft_tokens == 1 else 2


def _one_pass(gm: fx.GraphModule, ctx: PassContext, start: fx.Node, num_masked: int) -> fx.Node:
    """What the head takes of the last committed row and of the masked ones, [B, K, D]."""
    end, (ids, hidden, metadata) = output_node(gm), _true_rows(gm, ctx)
    if num_masked == 0:
        (head,) = take_newest(gm, ctx, _run(gm, ctx, ids, hidden, metadata), before=end)
        return head
    masked_ids, masked_hidden, ahead = _masked_rows(gm, ctx, start, num_masked)
    ids, hidden, *places, path = emit(
        gm, put_first, (masked_ids, masked_hidden, *ahead[:3]), (ids, hidden, *metadata[:3]),
        before=end, num_masked=num_masked,
    )  # fmt: skip
    slot, row, position = places
    head = _run(gm, ctx, ids, hidden, (slot, row, position, metadata[3]), path)
    width = output_widths(ctx.draft["forward"])[0]
    node: fx.Node = emit(
        gm, newest_and_masked, head, find_role(gm, "num_emitted"), before=end,
        num_masked=num_masked, width=width,
    )  # fmt: skip
    return node


def _prompt_passes(
    gm: fx.GraphModule, ctx: PassContext, start: fx.Node, num_masked: int
) -> fx.Node:
    """The same after a prompt: packed rows and rows of requests do not mix in one call."""
    end = output_node(gm)
    (head,) = take_newest(gm, ctx, _run(gm, ctx, *_true_rows(gm, ctx)), before=end)
    if num_masked == 0:
        return head
    ids, hidden, metadata = _masked_rows(gm, ctx, start, num_masked)
    path = emit(gm, masked_paths, metadata[2], before=end, num_masked=num_masked)
    masked = _run(gm, ctx, ids, hidden, metadata, path)
    node: fx.Node = emit(gm, lambda *parts: torch.cat(parts, 1), head, masked, before=end)
    return node


def _true_rows(gm: fx.GraphModule, ctx: PassContext) -> tuple[fx.Node, fx.Node, Metadata]:
    """Ids, hidden states and metadata of the rows that the target has given."""
    (hidden,) = splice(gm, ctx, ctx.draft["combine"], {"aux": find_role(gm, "aux")})
    slot, row, position = (find_role(gm, name) for name in ("slot", "row", "position"))
    table = find_role(gm, "block_table_RM")
    return find_role(gm, "draft_ids"), hidden, (slot, row, position, table)


def _masked_rows(
    gm: fx.GraphModule, ctx: PassContext, start: fx.Node, num_masked: int
) -> tuple[fx.Node, fx.Node, Metadata]:
    """The same of the masked rows, at `start` and the positions after it."""
    table = find_role(gm, "block_table_RM")
    slot, row, position = emit(
        gm, places_ahead, start, find_role(gm, "row_index"), find_role(gm, "live"), table,
        before=output_node(gm), num_rows=num_masked, max_seq_len=ctx.config.max_seq_len,
        block_size=ctx.config.block_size,
    )  # fmt: skip
    ids, hidden = splice(gm, ctx, ctx.draft["mask"], {"position_ids": position})
    return ids, hidden, (slot, row, position, table)


def _run(
    gm: fx.GraphModule,
    ctx: PassContext,
    ids: fx.Node,
    hidden: fx.Node,
    metadata: Metadata,
    path: fx.Node | None = None,
) -> fx.Node:
    """Splice one pass of the drafter over its caches; returns what the head takes."""
    arguments = {"input_ids": ids, "position_ids": metadata[2], "hidden": hidden}
    head, _ = splice(gm, ctx, ctx.draft["forward"], arguments)
    branches = None if path is None else Branches(path=path)
    page_markers(gm, ctx, markers(gm), "draft", metadata, branches=branches)
    return head


def propose_all(
    gm: fx.GraphModule, ctx: PassContext, head: fx.Node, start: fx.Node, count: int
) -> fx.Node:
    """The drafts [B, count] of one call of "propose" on [B, count, D]; draft i is for start + i."""
    end = output_node(gm)
    rows = emit(gm, lambda x_BKD: x_BKD.flatten(0, 1), head, before=end)
    token, *offered = splice(gm, ctx, ctx.draft["propose"], {"head_input": rows})
    if ctx.greedy_only or not offered:
        node: fx.Node = emit(gm, lambda x: x.unflatten(0, (-1, count)), token, before=end)
        return node
    logits, *ids = offered
    drafts = []
    for number in range(1, count + 1):
        best, own = (take_draft(gm, x, number, count) for x in (token, logits))
        drafts.append(draft_token(gm, ctx, (best, own, *ids), start, number))
    node = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=end)
    return node


def take_draft(gm: fx.GraphModule, source: fx.Node, number: int, count: int) -> fx.Node:
    """The rows of draft `number`, [B, ..], among those of all drafts, [B * K, ..]."""
    taken: fx.Node = emit(
        gm, lambda x: x.unflatten(0, (-1, count)).select(1, number - 1), source,
        before=output_node(gm),
    )  # fmt: skip
    if "example" in source.meta:
        taken.meta["example"] = source.meta["example"]
    return taken


def places_ahead(
    start_B: Any, index_B: Any, live_B: Any, block_table_RM: Any, *, num_rows: int,
    max_seq_len: int, block_size: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Slot, row and position of rows that stay in no cache, from `start` on, [B, M]."""
    live_B1, index_B1 = live_B.unsqueeze(1), index_B.unsqueeze(1)
    row_B1 = torch.where(live_B1, index_B1, -1).to(torch.int32)
    wanted_BM = start_B.unsqueeze(1) + arange_like(start_B, num_rows)
    position, row, _ = place(
        wanted_BM, row_B1, index_B1, live_B1, block_table_RM, max_seq_len=max_seq_len,
        block_size=block_size,
    )  # fmt: skip
    return torch.full_like(position, -1), row, position


def masked_paths(position_BM: Any, *, num_masked: int) -> Any:
    """Masked row i sees masked rows 0 to i: [B, M, M]."""
    at_M = arange_like(position_BM, num_masked)
    path_MM = torch.where(at_M <= at_M.unsqueeze(1), at_M, -1)
    return torch.zeros_like(position_BM).unsqueeze(2) + path_MM


def put_first(masked: Any, true: Any, *, num_masked: int) -> tuple[Any, ...]:
    """Ids, hidden states, slots, rows and positions of the masked rows with those of the true rows
    behind them, and the paths of all, [B, M + S, M].
    """
    path_BMM = masked_paths(masked[-1], num_masked=num_masked)
    none_BSM = torch.full_like(true[-1].unsqueeze(2).expand(-1, -1, num_masked), -1)
    joined = (torch.cat(pair, 1) for pair in zip(masked, true, strict=True))
    return (*joined, torch.cat([path_BMM, none_BSM], 1))


def newest_and_masked(x_BSD: Any, num_emitted_B: Any, *, num_masked: int, width: int) -> Any:
    """The last committed row of each request and its masked rows, [B, K, D]."""
    newest_B1 = (num_emitted_B + (num_masked - 1)).long().unsqueeze(1)
    newest_B1D = x_BSD.gather(1, newest_B1.unsqueeze(2).expand(-1, -1, width))
    return torch.cat([newest_B1D, x_BSD[:, :num_masked]], 1)
