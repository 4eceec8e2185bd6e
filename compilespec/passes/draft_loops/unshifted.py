"""Unshifted drafting: a separate causal model, which sees each token at its own position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.levels import Level
from compilespec.passes.draft_loops.recycled import next_token
from compilespec.passes.draft_loops.tree import Growth, grow_tree
from compilespec.passes.graph import arange_like, emit, find_role, output_node, splice
from compilespec.passes.insert_paged_attention import Branches, page_markers
from compilespec.passes.read_state import place
from compilespec.passes.recurrent_state import StateMetadata, keep_states
from compilespec.passes.rows import take_newest
from compilespec.passes.sampling import draft_token
from compilespec.program import markers


def unshifted(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Draft with token x_p in slot p of the drafter's cache.  Makes the role `drafts` ([B, K],
    int32).

    Decode: the S target tokens at seq_len+1 .. seq_len+S (slots after the bonus token are written
    again before anything attends to them); row n-1 gives draft 1; then K-1 single tokens from
    seq_len+n+1.  Prefill: the prompt at its positions, then K single tokens, the sampled one first.
    """
    count, end = ctx.config.num_draft_tokens, output_node(gm)
    start = find_role(gm, "start")
    if ctx.phase == "decode":
        emitted = find_role(gm, "num_emitted")
        logits = _all_rows(gm, ctx)
        (row,) = take_newest(gm, ctx, logits, before=end)
        if ctx.config.tree is not None:
            first = emit(gm, lambda start_B, n_B: start_B + n_B + 1, start, emitted, before=end)
            return 1 + _grow(gm, ctx, row, first)
        row = emit(gm, lambda x_B1V: x_B1V.squeeze(1), row, before=end)
        first = emit(gm, lambda start_B, n_B: start_B + n_B + 1, start, emitted, before=end)
        token = _propose(gm, ctx, row, first, 0)
        drafts, num_singles = [token], count - 1
    else:
        _run(gm, ctx, _metadata(gm), find_role(gm, "ids"), _prompt_state, ())
        token = emit(gm, lambda x_R1: x_R1.squeeze(1), find_role(gm, "target"), before=end)
        if ctx.config.tree is not None:
            logits = _next_logits(gm, ctx, token, start, 0)
            first = emit(gm, lambda start_B: start_B + 1, start, before=end)
            return 2 + _grow(gm, ctx, logits, first)
        first, drafts, num_singles = start, [], count
    for index in range(num_singles):
        token = _single(gm, ctx, token, first, index)
        drafts.append(token)
    stacked = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=end)
    stacked.meta["role"] = "drafts"
    return num_singles + 1


def num_unshifted_passes(ctx: PassContext) -> int:
    """Number of passes: K in decode; in prefill the prompt's pass and K single ones."""
    return ctx.config.num_draft_tokens + (ctx.phase == "prefill")


def _all_rows(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """The pass over the step's S target tokens; returns its logits, [B, S, V]."""
    end, config = output_node(gm), ctx.config
    table = find_role(gm, "block_table_RM")
    ids, position, row, slot = emit(
        gm, shifted_rows, find_role(gm, "target"), find_role(gm, "start"),
        _live_row(gm), find_role(gm, "row_index"), find_role(gm, "live"), table, before=end,
        num_tokens=config.num_step_tokens, max_seq_len=config.max_seq_len,
        block_size=config.block_size,
    )  # fmt: skip
    known = (find_role(gm, "start"), find_role(gm, "num_emitted"))
    return _run(gm, ctx, (slot, row, position, table), ids, _emitted_state, known)


def shifted_rows(
    target_BS: Any, start_B: Any, row_B: Any, index_B: Any, live_B: Any, block_table_RM: Any, *,
    num_tokens: int, max_seq_len: int, block_size: int,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Token j has position start + 1 + j.  Returns ids, position, row, slot, [B, S]."""
    wanted_BS = (start_B + 1).unsqueeze(1) + arange_like(start_B, num_tokens)
    position, row, slot = place(
        wanted_BS, row_B.unsqueeze(1), index_B.unsqueeze(1), live_B.unsqueeze(1), block_table_RM,
        max_seq_len=max_seq_len, block_size=block_size,
    )  # fmt: skip
    return target_BS.clamp(min=0), position, row, slot


def _single(
    gm: fx.GraphModule, ctx: PassContext, token: fx.Node, first: fx.Node, index: int
) -> fx.Node:
    """One pass of one token per request, at position first + index; returns the next token, [B]."""
    logits = _next_logits(gm, ctx, token, first, index)
    row = emit(gm, lambda x_B1V: x_B1V.squeeze(1), logits, before=output_node(gm))
    return _propose(gm, ctx, row, first, index + 1)


def _grow(gm: fx.GraphModule, ctx: PassContext, logits: fx.Node, first: fx.Node) -> int:
    """A tree of drafts after the logits [B, 1, V], the first ones at position `first`."""

    def advance(level: Level) -> fx.Node:
        ids = emit(gm, lambda ids_BF: ids_BF.clamp(min=0), level.ids, before=output_node(gm))
        return _run(gm, ctx, level.metadata, ids, _prompt_state, (), level.branches)

    return grow_tree(gm, ctx, logits, "logits_BV", Growth(first, first, advance))


def _next_logits(
    gm: fx.GraphModule, ctx: PassContext, token: fx.Node, first: fx.Node, index: int
) -> fx.Node:
    """The logits [B, 1, V] after one token per request, at position first + index."""
    end, config = output_node(gm), ctx.config
    table = find_role(gm, "block_table_RM")
    ids, position, row, slot = emit(
        gm, next_token, token, first, _live_row(gm), find_role(gm, "row_index"),
        find_role(gm, "live"), table, before=end, step=index + 1, max_seq_len=config.max_seq_len,
        block_size=config.block_size,
    )  # fmt: skip
    is_emitted = ctx.phase == "prefill" and index == 0  # the first token after the prompt
    state = _prompt_state if is_emitted else _drafted_state
    known = (first, int(ctx.phase == "prefill"))
    return _run(gm, ctx, (slot, row, position, table), ids, state, () if is_emitted else known)


def _live_row(gm: fx.GraphModule) -> fx.Node:
    """The state row of each request, -1 if nothing may be written; [B]."""
    node: fx.Node = emit(
        gm,
        lambda index, live: torch.where(live, index, -1).to(torch.int32),
        find_role(gm, "row_index"),
        find_role(gm, "live"),
        before=output_node(gm),
    )
    return node


def _metadata(gm: fx.GraphModule) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    slot, row, position = (find_role(gm, name) for name in ("slot", "row", "position"))
    return slot, row, position, find_role(gm, "block_table_RM")


def _run(
    gm: fx.GraphModule,
    ctx: PassContext,
    metadata: tuple[fx.Node, fx.Node, fx.Node, fx.Node],
    ids: fx.Node,
    state: Callable[..., Any],
    known: tuple[Any, ...],
    branches: Branches | None = None,
) -> fx.Node:
    """Splice one pass of the model over the drafter's caches; returns its logits.

    Args:
        ids: the target's; a drafter of another vocabulary has a call "translate" for them.
        state, known: what gives a recurrent drafter's `absorbed` and `commits`
            (`StateMetadata`), called with the positions and `known`.
    """
    if "translate" in ctx.draft:
        (ids,) = splice(gm, ctx, ctx.draft["translate"], {"input_ids": ids})
    arguments = {"input_ids": ids, "position_ids": metadata[2]}
    (logits,) = splice(gm, ctx, ctx.draft["forward"], arguments)
    page_markers(gm, ctx, markers(gm), "draft", metadata, branches=branches)
    if ctx.draft["forward"].num_recurrent_markers:
        _, row, position, _ = metadata
        first = markers(gm, "recurrence", "causal_conv")[0]
        absorbed, commits = emit(gm, state, position, *known, before=first)
        at = StateMetadata(row=row, position=position, absorbed=absorbed, commits=commits)
        keep_states(gm, ctx, "draft", at)
    return logits


def _prompt_state(position_BS: Any) -> tuple[Any, Any]:
    """The model's state holds all tokens before these, which are the request's for good."""
    return position_BS, position_BS >= 0


def _emitted_state(position_BS: Any, start_B: Any, num_emitted_B: Any) -> tuple[Any, Any]:
    """The step before, or prefill, took the token at `start`; of the target's tokens n are kept."""
    absorbed_B1 = (start_B + 1).unsqueeze(1)
    commits_BS = position_BS < absorbed_B1 + num_emitted_B.unsqueeze(1)
    return absorbed_B1 + torch.zeros_like(position_BS), commits_BS


def _drafted_state(position_B1: Any, first_B: Any, num_emitted: int) -> tuple[Any, Any]:
    """Drafts after the last emitted token, the one before position first + num_emitted."""
    return (first_B + num_emitted).unsqueeze(1) + torch.zeros_like(position_B1), position_B1 < 0


def _propose(
    gm: fx.GraphModule, ctx: PassContext, logits_row: fx.Node, first: fx.Node, offset: int
) -> fx.Node:
    """The draft for position first + offset."""
    proposal = splice(gm, ctx, ctx.draft["propose"], {"logits_BV": logits_row})
    number = offset + (ctx.phase == "decode")
    return draft_token(gm, ctx, proposal, first, offset, number=number)
