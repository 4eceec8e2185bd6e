"""Drafting on the target's caches: one query per draft, all at the same position."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import emit, find_role, output_node, splice
from compilespec.passes.insert_paged_attention import page_markers
from compilespec.passes.kv_groups import Metadata
from compilespec.passes.read_state import place
from compilespec.passes.rows import take_newest
from compilespec.passes.sampling import draft_token
from compilespec.program import markers


def shared_kv(gm: fx.GraphModule, ctx: PassContext) -> int:
    """K single-token passes at the position of the newest key, over caches that the target wrote.

    The first takes the bonus token and the target's hidden state one position back; each later pass
    takes the draft and the hidden state of the pass before.  All share one set of metadata, whose
    slots are -1: the drafter writes nothing.  Makes the role `drafts` ([B, K], int32).  Torch IR.
    Source: requirements A2, S9.
    """
    end, config = output_node(gm), ctx.config
    token, hidden = _newest(gm, ctx)
    (hidden,) = splice(gm, ctx, ctx.draft["combine"], {"aux": hidden})
    metadata = _metadata(gm, ctx)
    drafts: list[fx.Node] = []
    newest = find_role(gm, "start")
    if ctx.phase == "decode":
        emitted = find_role(gm, "num_emitted")
        newest = emit(gm, lambda start_B, n_B: start_B + n_B, newest, emitted, before=end)
    for step in range(config.num_draft_tokens):
        ids = emit(gm, lambda token_B: token_B.clamp(min=0).unsqueeze(1), token, before=end)
        arguments = {"input_ids": ids, "position_ids": metadata[2], "hidden": hidden}
        head_input, hidden = splice(gm, ctx, ctx.draft["forward"], arguments)
        page_markers(gm, ctx, markers(gm), "target", metadata, layers=ctx.kv_layers)
        row = emit(gm, lambda x_B1D: x_B1D.squeeze(1), head_input, before=end)
        proposal = splice(gm, ctx, ctx.draft["propose"], {"head_input": row})
        token = draft_token(gm, ctx, proposal, newest, step + 1)
        drafts.append(token)
    stacked = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=end)
    stacked.meta["role"] = "drafts"
    return len(drafts)


def _newest(gm: fx.GraphModule, ctx: PassContext) -> tuple[fx.Node, fx.Node]:
    """The bonus token [B] and the hidden state before it [B, 1, A*D] of each request."""
    end = output_node(gm)
    taps = [find_role(gm, f"aux.{index}") for index in range(len(ctx.aux_layers))]
    aux = emit(gm, lambda *parts: torch.cat(parts, -1), *taps, before=end)
    token = newest_token(gm, ctx)
    (hidden,) = take_newest(gm, ctx, aux, before=end)
    return token, hidden


def newest_token(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """The last token of each request's step, or the one after its prompt, [B]."""
    end, target = output_node(gm), find_role(gm, "target")
    node: fx.Node
    if ctx.phase == "decode":
        node = emit(gm, bonus_token, target, find_role(gm, "num_emitted"), before=end)
    else:
        node = emit(gm, lambda target_R1: target_R1.squeeze(1), target, before=end)
    return node


def bonus_token(target_BS: Any, num_emitted_B: Any) -> Any:
    """The last token of each request's step, [B]."""
    return target_BS.gather(1, (num_emitted_B - 1).long().unsqueeze(1)).squeeze(1)


def _metadata(gm: fx.GraphModule, ctx: PassContext) -> Metadata:
    """Slot, row and position of the queries, [B, 1], and the block table, for all passes."""
    config, table = ctx.config, find_role(gm, "block_table_RM")
    newest = [find_role(gm, "start")]
    if ctx.phase == "decode":
        newest.append(find_role(gm, "num_emitted"))
    slot, row, position = emit(
        gm, place_queries, find_role(gm, "row_index"), find_role(gm, "live"), table, *newest,
        before=output_node(gm), max_seq_len=config.max_seq_len, block_size=config.block_size,
    )  # fmt: skip
    return slot, row, position, table


def place_queries(
    index_B: Any, live_B: Any, block_table_RM: Any, *newest: Any, max_seq_len: int, block_size: int
) -> tuple[Any, Any, Any]:
    """(slot, row, position), [B, 1]: a query has the newest key's position, the sum of `newest`
    less one, and writes nothing.
    """
    wanted_B1 = (sum(newest) - 1).unsqueeze(1)
    live_B1, index_B1 = live_B.unsqueeze(1), index_B.unsqueeze(1)
    row_B1 = torch.where(live_B1, index_B1, -1).to(torch.int32)
    position, row, _ = place(
        wanted_B1, row_B1, index_B1, live_B1, block_table_RM, max_seq_len=max_seq_len,
        block_size=block_size,
    )  # fmt: skip
    return torch.full_like(position, -1), row, position
