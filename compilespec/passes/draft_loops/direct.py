"""Direct drafting: one call gives all K drafts; no cache, no loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.evidence import level_of_matches
from compilespec.passes.graph import add_buffer, arange_like, emit, find_role, output_node, splice
from compilespec.passes.rows import take_newest
from compilespec.program import PAD, BufferSpec, Traced


def direct(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Splice the drafter's single call, "draft", with the inputs that its argument names ask for:

    history_BL  int32 [B, max_seq_len]: the request's tokens, the bonus token last, then PAD
    length_B    int32 [B]: how many of them are valid
    past_ML     int32 [M, max_seq_len]: texts of requests that ended, which the host writes
    hidden_BE   [B, A*D]: the target's taps at the last committed row, n-1

    The history is a state buffer of one row per request, declared only if it is read.  Makes the
    role `drafts` ([B, K], int32), in which PAD is not a draft.  Torch IR.
    """
    drafts, *sure = proposed(gm, ctx)
    drafts.meta["role"] = "drafts"
    if sure and ctx.tells_evidence:
        level = emit(gm, level_of_matches, sure[0], before=output_node(gm))
        level.meta["role"] = "level"
    return 1


def proposed(gm: fx.GraphModule, ctx: PassContext) -> tuple[fx.Node, ...]:
    """What the call "draft" gives: the drafts, and how sure they are if it says so."""
    call = ctx.draft["draft"]
    reads = {entry.name for entry in call.inputs if entry.kind == "argument"}
    arguments: dict[str, fx.Node] = {}
    if reads & {"history_BL", "length_B"}:
        arguments["length_B"] = _length(gm, ctx)
    if "history_BL" in reads:
        arguments["history_BL"] = _history(gm, ctx, arguments["length_B"])
    if "past_ML" in reads:
        arguments["past_ML"] = _past_texts(gm, ctx, call)
    if "hidden_BE" in reads:
        arguments["hidden_BE"] = newest_hidden(gm, ctx)
    return splice(gm, ctx, call, arguments)


def keep_history(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Write the tokens of a step of K = 0, which drafts nothing, into the history."""
    if any(entry.name == "history_BL" for entry in ctx.draft["draft"].inputs):
        _history(gm, ctx, _length(gm, ctx))


def _length(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """The tokens of each request, including this step's: up to `start`, then the emitted ones."""
    parts = [find_role(gm, "start")]
    if ctx.phase == "decode":
        parts.append(find_role(gm, "num_emitted"))
    limit = ctx.config.max_seq_len
    node: fx.Node = emit(
        gm, lambda *terms: (sum(terms) + 1).clamp(max=limit), *parts, before=output_node(gm)
    )
    return node


def _history(gm: fx.GraphModule, ctx: PassContext, length: fx.Node) -> fx.Node:
    """Write this step's tokens into the history rows and read the rows of the step's requests."""
    config, end = ctx.config, output_node(gm)
    history = add_buffer(
        gm,
        ctx,
        BufferSpec(
            name="history_RL",
            kind="state",
            shape=(config.max_batch_size + 1, config.max_seq_len),  # the last row is spare
            dtype=torch.int32,
            fill=PAD,
        ),
    )
    index, start = find_role(gm, "row_index"), find_role(gm, "start")
    emitted = find_role(gm, "emitted")
    if ctx.phase == "decode":
        places = emit(
            gm, emitted_places, index, start, find_role(gm, "num_emitted"), emitted, before=end,
            num_tokens=config.num_verify_tokens, spare_row=config.max_batch_size,
            max_seq_len=config.max_seq_len,
        )  # fmt: skip
    else:
        packed = (find_role(gm, name) for name in ("ids_T", "position_T", "row_T"))
        places = emit(
            gm, prompt_places, *packed, index, start, emitted, before=end,
            spare_row=config.max_batch_size, max_seq_len=config.max_seq_len,
        )  # fmt: skip
    node: fx.Node = emit(
        gm, write_and_read, history, *places, index, length, find_role(gm, "live"), before=end,
        max_seq_len=config.max_seq_len,
    )  # fmt: skip
    return node


def emitted_places(
    index_B: Any, start_B: Any, count_B: Any, emitted_BS: Any, *, num_tokens: int, spare_row: int,
    max_seq_len: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Decode: emitted token j has position start + 1 + j.  Returns (row, column, token), [B, S];
    PAD and tokens past the maximum length go to the spare row.
    """
    offset_S = arange_like(start_B, num_tokens)
    wanted_BS = (start_B.unsqueeze(1) + offset_S + 1).long()
    inside_BS = (offset_S < count_B.unsqueeze(1)) & (wanted_BS < max_seq_len)
    row_BS = torch.where(inside_BS, index_B.unsqueeze(1), spare_row)
    return row_BS, wanted_BS.clamp(max=max_seq_len - 1), emitted_BS


def prompt_places(
    ids_T: Any, position_T: Any, row_T: Any, index_R: Any, start_R: Any, emitted_R1: Any, *,
    spare_row: int, max_seq_len: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Prefill: the chunks' tokens at their positions, and each first token after its prompt.

    Returns (row, column, token), [T + R].  An unfinished prompt has the spare row in `index_R`.
    """
    row_R = torch.where(start_R < max_seq_len, index_R, spare_row)
    row = torch.cat([torch.where(row_T >= 0, row_T, spare_row).long(), row_R])
    column = torch.cat([position_T, start_R]).clamp(max=max_seq_len - 1).long()
    return row, column, torch.cat([ids_T, emitted_R1.squeeze(1)])


def write_and_read(
    history_RL: Any, row: Any, column: Any, token: Any, index_B: Any, length_B: Any, live_B: Any,
    *, max_seq_len: int,
) -> Any:  # fmt: skip
    """[B, max_seq_len] tokens, PAD from `length_B` on, so that tokens of the row's earlier owner
    are never seen.  Padded rows hold only PAD.
    """
    history_RL.index_put_((row, column), token)
    rows_BL = history_RL[index_B]
    is_valid = arange_like(length_B, max_seq_len) < length_B.unsqueeze(1)
    return torch.where(is_valid & live_B.unsqueeze(1), rows_BL, PAD)


def _past_texts(gm: fx.GraphModule, ctx: PassContext, call: Traced) -> fx.Node:
    placeholders = call.graph_module.graph.find_nodes(op="placeholder")
    (past,) = (
        node
        for node, entry in zip(placeholders, call.inputs, strict=True)
        if entry.name == "past_ML"
    )
    return add_buffer(
        gm,
        ctx,
        BufferSpec(
            name="past_ML",
            kind="state",
            shape=tuple(past.meta["example_value"].shape),
            dtype=torch.int32,
            fill=PAD,
            by_host=True,
        ),
    )


def newest_hidden(gm: fx.GraphModule, ctx: PassContext) -> fx.Node:
    """The target's taps at the last committed row, concatenated: [B, A*D]."""
    end = output_node(gm)
    taps = [find_role(gm, f"aux.{index}") for index in range(len(ctx.aux_layers))]
    aux = emit(gm, lambda *parts: torch.cat(parts, -1), *taps, before=end)
    (row,) = take_newest(gm, ctx, aux, before=end)
    node: fx.Node = emit(gm, lambda x_B1E: x_B1E.squeeze(1), row, before=end)
    return node
