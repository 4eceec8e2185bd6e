"""Windowed drafting: one module per draft step, each with its own cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import compilespec.ops.roll_window  # noqa: F401  (registers the operator)
from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer, arange_like, emit, find_role, output_node, splice
from compilespec.passes.insert_paged_attention import page_markers
from compilespec.passes.kv_groups import Metadata
from compilespec.passes.read_state import place
from compilespec.passes.rows import Rows, take_newest, take_rows
from compilespec.passes.sampling import draft_token
from compilespec.program import BufferSpec, Traced, markers


def windowed(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Module i proposes draft i+1.  Makes the role `drafts` ([B, K], int32 target ids).

    Input pairs are (hidden state of position t, token at t+1).  Decode: the last K pairs are kept
    in a ring per request; with the S new ones a window of K+1 pairs ends at the last committed row
    e, so that it holds no rejected row and skips no slot.  Prefill: the window is the packed
    prompt.  Then, by `ctx.chain`:

    module_rows  module i's row t = (module i-1's output t, token t+1+i), positions e-K .. e
    target_rows  module i's row t = (target's hidden t+i, token t+1+i), what lies past e being the
                 output of an earlier module and a draft; positions e-K-i .. e

    The last i rows that module i writes hold drafts; the next step's window covers them.
    Source: requirements M4-M7, H-4, H-6, H-9, H-21, H-22.
    """
    end, count = output_node(gm), ctx.config.num_draft_tokens
    aux, ids = find_role(gm, "aux"), find_role(gm, "draft_ids")
    run = _decode_window if ctx.phase == "decode" else _packed_window
    drafts = run(gm, ctx, aux, ids)
    stacked = emit(gm, lambda *parts: torch.stack(parts, 1), *drafts, before=end)
    stacked.meta["role"] = "drafts"
    return count


def _decode_window(
    gm: fx.GraphModule, ctx: PassContext, hidden: fx.Node, ids: fx.Node
) -> list[fx.Node]:
    end, config = output_node(gm), ctx.config
    window, index = config.num_verify_tokens, find_role(gm, "row_index")
    rings = _rings(gm, ctx)
    emitted, table = find_role(gm, "num_emitted"), find_role(gm, "block_table_RM")
    pairs = (*rings, index, hidden, ids, emitted)
    if rolls_in_one_kernel(ctx):
        with gm.graph.inserting_before(end):
            rolled = gm.graph.call_function(torch.ops.compilespec.roll_window.default, pairs)
        hidden, ids = emit(gm, lambda both: (both[0], both[1]), rolled, before=end)
    else:
        hidden, ids = emit(gm, take_window, *pairs, before=end, window=window)
        emit(gm, write_ring, *rings, index, hidden, ids, before=end)
    start, live = find_role(gm, "start"), find_role(gm, "live")
    newest = emit(gm, lambda start_B, n_B: start_B + n_B, start, emitted, before=end)
    drafts: list[fx.Node] = []
    for step in range(config.num_draft_tokens):
        num_rows = window + (step if ctx.chain == "target_rows" else 0)
        metadata = emit(
            gm, window_places, start, emitted, index, live, table, before=end,
            num_rows=num_rows, max_seq_len=config.max_seq_len, block_size=config.block_size,
        )  # fmt: skip
        head_input, recycled = _run(gm, ctx, step, (*metadata, table), ids, hidden)
        last = Rows(index=None)
        row, output = (take_rows(gm, rows, last, before=end) for rows in (head_input, recycled))
        row = emit(gm, lambda x_B1D: x_B1D.squeeze(1), row, before=end)
        drafts.append(_propose(gm, ctx, step, row, newest))
        if step + 1 == config.num_draft_tokens:
            break
        if ctx.chain == "target_rows":
            ids, hidden = emit(gm, append_pair, ids, hidden, drafts[-1], output, before=end)
        else:
            ids = emit(gm, next_ids, ids, drafts[-1], before=end)
            hidden = recycled
    return drafts


def rolls_in_one_kernel(ctx: PassContext) -> bool:
    """Whether to use the operator: on a GPU, where gathers and writes are separate launches."""
    return ctx.config.device.type == "cuda"


def _packed_window(
    gm: fx.GraphModule, ctx: PassContext, hidden: fx.Node, ids: fx.Node
) -> list[fx.Node]:
    end, config = output_node(gm), ctx.config
    last, owner = find_role(gm, "last_R"), find_role(gm, "owner_T")
    position, index = find_role(gm, "position"), find_role(gm, "row_index")
    prompt = emit(
        gm, packed_ring, hidden, ids, position, last, before=end, num_pairs=config.num_draft_tokens
    )
    emit(gm, store_ring, *_rings(gm, ctx), index, *prompt, before=end)
    table, drafts = find_role(gm, "block_table_RM"), []
    metadata = (find_role(gm, "slot"), find_role(gm, "row"), position, table)
    for step in range(config.num_draft_tokens):
        head_input, recycled = _run(gm, ctx, step, metadata, ids, hidden)
        (row,) = take_newest(gm, ctx, head_input, before=end)
        row = emit(gm, lambda x_R1D: x_R1D.squeeze(1), row, before=end)
        drafts.append(_propose(gm, ctx, step, row, find_role(gm, "start")))
        if step + 1 == config.num_draft_tokens:
            break
        ids = emit(gm, shift_ids, ids, drafts[-1], owner, last, before=end)
        if ctx.chain == "target_rows":
            hidden = emit(gm, shift_rows, hidden, recycled, owner, last, before=end)
        else:
            hidden = recycled
    return drafts


def _rings(gm: fx.GraphModule, ctx: PassContext) -> tuple[fx.Node, fx.Node]:
    """The last K input pairs of each request before `start`: hidden states and their tokens."""
    config, width = ctx.config, argument_width(ctx.draft["forward.0"], "hidden")
    rows = (config.max_batch_size + 1, config.num_draft_tokens)
    state = BufferSpec(
        name="ring_hidden_RKD", kind="state", shape=(*rows, width), dtype=config.dtype
    )
    ids = BufferSpec(name="ring_ids_RK", kind="state", shape=rows, dtype=torch.int32)
    return add_buffer(gm, ctx, state), add_buffer(gm, ctx, ids)


def argument_width(call: Traced, name: str) -> int:
    """The last dimension of an argument of a captured call."""
    nodes = call.graph_module.graph.find_nodes(op="placeholder")
    entry = next(n for n, given in zip(nodes, call.inputs, strict=True) if given.name == name)
    return int(entry.meta["example_value"].shape[-1])


def take_window(
    ring_hidden_RKD: Any, ring_ids_RK: Any, index_B: Any, hidden_BSD: Any, ids_BS: Any,
    num_emitted_B: Any, *, window: int,
) -> tuple[Any, Any]:  # fmt: skip
    """Pairs cat[n-1 : n+K] of the ring's K and the step's S: [B, K+1, D] and [B, K+1]."""
    hidden = torch.cat([ring_hidden_RKD[index_B], hidden_BSD], 1)
    ids = torch.cat([ring_ids_RK[index_B], ids_BS], 1)
    place_BW = ((num_emitted_B - 1).unsqueeze(1) + arange_like(num_emitted_B, window)).long()
    place_BWD = place_BW.unsqueeze(-1).expand(-1, -1, hidden_BSD.shape[-1])
    return hidden.gather(1, place_BWD), ids.gather(1, place_BW)


def write_ring(
    ring_hidden_RKD: Any, ring_ids_RK: Any, index_B: Any, hidden_BWD: Any, ids_BW: Any
) -> Any:
    """Keep the window's last K pairs; padded rows write the spare row."""
    ring_hidden_RKD.index_put_((index_B,), hidden_BWD[:, 1:])
    return ring_ids_RK.index_put_((index_B,), ids_BW[:, 1:])


def store_ring(
    ring_hidden_RKD: Any, ring_ids_RK: Any, index_R: Any, hidden_RKD: Any, ids_RK: Any
) -> Any:
    ring_hidden_RKD.index_put_((index_R,), hidden_RKD)
    return ring_ids_RK.index_put_((index_R,), ids_RK)


def packed_ring(
    hidden_1TD: Any, ids_1T: Any, position_1T: Any, last_R: Any, *, num_pairs: int
) -> tuple[Any, Any]:
    """The last K pairs of each request of a packed call, zeros if the prompt is shorter."""
    back_K = arange_like(last_R, num_pairs) - (num_pairs - 1)
    last_position_R1 = position_1T[0][last_R.long()].unsqueeze(1)
    inside_RK = last_position_R1 + back_K >= 0
    place_RK = (last_R.unsqueeze(1) + back_K).clamp(min=0).long()
    hidden_RKD = torch.where(inside_RK.unsqueeze(-1), hidden_1TD[0][place_RK], 0)
    return hidden_RKD, torch.where(inside_RK, ids_1T[0][place_RK], 0)


def window_places(
    start_B: Any, num_emitted_B: Any, index_B: Any, live_B: Any, block_table_RM: Any, *,
    num_rows: int, max_seq_len: int, block_size: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Slot, row and position of the `num_rows` rows that end at the last committed one.

    Positions before 0 and past the maximum length are redirected (H-9, E5).
    """
    wanted_BW = (start_B + num_emitted_B - num_rows).unsqueeze(1) + arange_like(start_B, num_rows)
    inside_BW = live_B.unsqueeze(1) & (wanted_BW >= 0)
    row_BW = torch.where(inside_BW, index_B.unsqueeze(1), -1).to(torch.int32)
    position, row, slot = place(
        wanted_BW.clamp(min=0), row_BW, index_B.unsqueeze(1), inside_BW, block_table_RM,
        max_seq_len=max_seq_len, block_size=block_size,
    )  # fmt: skip
    return slot, row, position


def next_ids(ids_BW: Any, draft_B: Any) -> Any:
    """Shift each request's tokens by one row; the last row gets the draft."""
    return torch.cat([ids_BW[:, 1:], draft_B.clamp(min=0).unsqueeze(1)], 1)


def append_pair(ids_BW: Any, hidden_BWD: Any, draft_B: Any, output_B1D: Any) -> tuple[Any, Any]:
    """Append one pair: the module's own output with its draft."""
    return (
        torch.cat([ids_BW, draft_B.clamp(min=0).unsqueeze(1)], 1),
        torch.cat([hidden_BWD, output_B1D], 1),
    )


def shift_ids(ids_1T: Any, draft_R: Any, owner_T: Any, last_R: Any) -> Any:
    """`next_ids` of packed rows.  The last rows of an unfinished prompt get wrong tokens; the next
    chunk runs those rows again.
    """
    owner_T = owner_T.long()
    moved_T = ids_1T[0].roll(-1, 0)
    return torch.where(_is_last(owner_T, last_R), draft_R.clamp(min=0)[owner_T], moved_T).unsqueeze(
        0
    )


def shift_rows(hidden_1TD: Any, recycled_1TD: Any, owner_T: Any, last_R: Any) -> Any:
    """Shift hidden states by one row; a request's last row takes the module's output."""
    moved_TD = hidden_1TD[0].roll(-1, 0)
    is_last_T1 = _is_last(owner_T.long(), last_R).unsqueeze(-1)
    return torch.where(is_last_T1, recycled_1TD[0], moved_TD).unsqueeze(0)


def _is_last(owner_T: Any, last_R: Any) -> Any:
    return arange_like(owner_T, owner_T.size(0)) == last_R[owner_T]


def _run(
    gm: fx.GraphModule,
    ctx: PassContext,
    step: int,
    metadata: Metadata,
    ids: fx.Node,
    hidden: fx.Node,
) -> tuple[fx.Node, ...]:
    """Splice one pass of the step's module over the step's own caches."""
    arguments = {"input_ids": ids, "position_ids": metadata[2], "hidden": hidden}
    outputs = splice(gm, ctx, ctx.draft[f"forward.{step}"], arguments)
    page_markers(
        gm, ctx, markers(gm), f"draft.{step}", metadata,
        block_size=ctx.kv_block_sizes[step] if ctx.kv_block_sizes else None,
    )  # fmt: skip
    return outputs


def _propose(
    gm: fx.GraphModule, ctx: PassContext, step: int, row: fx.Node, newest: fx.Node
) -> fx.Node:
    """Draft step + 1, whose position is step + 1 past the bonus token's."""
    proposal = splice(gm, ctx, ctx.draft[f"propose.{step}"], {"head_input": row})
    return draft_token(gm, ctx, proposal, newest, step + 1)
