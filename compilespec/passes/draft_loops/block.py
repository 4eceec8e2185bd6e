"""Block drafting: one pass over masked rows that see each other, on a context from the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.parallel import propose_all, take_draft
from compilespec.passes.draft_loops.recycled import next_position
from compilespec.passes.draft_loops.shared_kv import newest_token
from compilespec.passes.evidence import note_confidence
from compilespec.passes.graph import arange_like, emit, find_role, output_node, splice
from compilespec.passes.insert_paged_attention import Branches, cache_of, page_markers
from compilespec.passes.kv_groups import Metadata
from compilespec.passes.read_state import place
from compilespec.passes.sampling import draft_token
from compilespec.program import markers


def block(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Write the context of the committed rows, then splice one pass over the block that begins with
    the newest token.

    Keys and values of the context are the drafter's projections of the target's taps: of rejected
    rows none is written, and the block's rows, which see the context before the newest token and
    each other by paths, leave nothing.  Makes the role `drafts` ([B, K], int32), whose K is that of
    the program's largest.  Torch IR.  Source: Chen et al. 2026 (DFlash).
    """
    write_context(gm, ctx)
    newest = next_position(gm, ctx)
    token = newest_token(gm, ctx)
    ids, position, *sights = splice(
        gm, ctx, ctx.draft["block"], {"token": token, "position": newest}
    )
    metadata = _places(gm, ctx, newest, ids)
    rows = {"input_ids": ids, "position_ids": position}
    (head,) = splice(gm, ctx, ctx.draft["forward"], rows)
    for layer, marker in enumerate(markers(gm)):
        first, path = sights[2 * layer : 2 * layer + 2]
        sight = Branches(path=path, first=first)
        page_markers(gm, ctx, [marker], "draft", metadata, layers=[layer], branches=sight)
    count = ctx.config.num_row_tokens - 1
    if "follow" in ctx.draft:
        drafts = _propose_in_turn(gm, ctx, head, token, newest, count)
    else:
        head = emit(gm, lambda x_BND: x_BND[:, :count], head, before=output_node(gm))
        drafts = propose_all(gm, ctx, head, newest, count)
        for number in range(1, count + 1):
            note_confidence(gm, ctx, head, token, number, place=number - 1)
    drafts.meta["role"] = "drafts"
    return 1


def _propose_in_turn(
    gm: fx.GraphModule,
    ctx: PassContext,
    head: fx.Node,
    token: fx.Node,
    newest: fx.Node,
    count: int,
) -> fx.Node:
    """The drafts [B, count]: one product gives the logits of all rows, to which each draft adds
    what follows from the one before it.
    """
    end, drafts = output_node(gm), []
    head, state = splice(gm, ctx, ctx.draft["state"], {"head_input": head, "token": token})
    rows = emit(gm, lambda x_BND: x_BND[:, :count].flatten(0, 1), head, before=end)
    (base,) = splice(gm, ctx, ctx.draft["base"], {"head_input": rows})
    for number in range(1, count + 1):
        row, logits = (take_draft(gm, x, number, count) for x in (rows, base))
        features, state = splice(
            gm, ctx, ctx.draft["follow"], {"head_input": row, "token": token, "state": state}
        )
        proposal = splice(gm, ctx, ctx.draft["propose"], {"base": logits, "features": features})
        note_confidence(gm, ctx, row, token, number)
        token = draft_token(gm, ctx, proposal, newest, number)
        drafts.append(token)
    node: fx.Node = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=end)
    return node


def write_context(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Write keys and values of the committed rows to the drafter's caches."""
    end, config = output_node(gm), ctx.config
    taps = [find_role(gm, f"aux.{index}") for index in range(len(ctx.aux_layers))]
    aux = emit(gm, lambda *parts: torch.cat(parts, -1), *taps, before=end)
    slot, position = find_role(gm, "slot"), find_role(gm, "position")
    if ctx.phase == "decode":
        slot = emit(gm, committed_slots, slot, find_role(gm, "num_emitted"), before=end,
                    num_rows=config.num_verify_tokens)  # fmt: skip
    parts = splice(gm, ctx, ctx.draft["context"], {"aux": aux, "position_ids": position})
    blocks = (config.num_blocks, config.block_size)
    for layer in range(len(parts) // 2):
        key, value = parts[2 * layer : 2 * layer + 2]
        caches = [
            cache_of(gm, ctx, f"draft.{layer}.{half}", part, blocks)
            for half, part in (("key", key), ("value", value))
        ]
        with gm.graph.inserting_before(end):
            gm.graph.call_function(
                torch.ops.compilespec.write_cache.default, (key, value, *caches, slot)
            )


def committed_slots(slot_BS: Any, num_emitted_B: Any, *, num_rows: int) -> Any:
    """The slots of the rows that stay, -1 of rejected ones."""
    is_kept_BS = arange_like(slot_BS, num_rows) < num_emitted_B.unsqueeze(1)
    return torch.where(is_kept_BS, slot_BS, -1)


def _places(gm: fx.GraphModule, ctx: PassContext, newest: fx.Node, ids: fx.Node) -> Metadata:
    """Metadata of the block's rows: the last position of the context, and nothing to write."""
    table = find_role(gm, "block_table_RM")
    slot, row, position = emit(
        gm, block_places, newest, ids, find_role(gm, "row_index"), find_role(gm, "live"), table,
        before=output_node(gm), max_seq_len=ctx.config.max_seq_len,
        block_size=ctx.config.block_size,
    )  # fmt: skip
    return slot, row, position, table


def block_places(
    newest_B: Any, ids_BW: Any, index_B: Any, live_B: Any, block_table_RM: Any, *,
    max_seq_len: int, block_size: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Slot, row and position of the rows of each request's block, [B, W]."""
    live_B1, index_B1 = live_B.unsqueeze(1), index_B.unsqueeze(1)
    row_B1 = torch.where(live_B1, index_B1, -1).to(torch.int32)
    wanted_BW = (newest_B - 1).clamp(min=0).unsqueeze(1) + torch.zeros_like(ids_BW)
    position, row, _ = place(
        wanted_BW, row_B1, index_B1, live_B1, block_table_RM, max_seq_len=max_seq_len,
        block_size=block_size,
    )  # fmt: skip
    return torch.full_like(position, -1), row, position
