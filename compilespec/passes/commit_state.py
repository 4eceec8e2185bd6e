"""Writes the step's result back into the state rows, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import add_buffer, emit, find_role, has_role, output_node, set_outputs
from compilespec.passes.read_state import token_rows
from compilespec.passes.trees import parent_rows


def commit_state(gm: fx.GraphModule, ctx: PassContext) -> int:
    """tokens_RS = [bonus | drafts], seq_len += n, for live rows; padded ones write the spare row.
    With a tree of drafts also parents_RS.

    A request whose prompt is continued in the next call commits nothing.  Numerics: exact.  Torch
    IR.
    """
    before, target = output_node(gm), find_role(gm, "target")
    index, start, count = (
        find_role(gm, "row_index"),
        find_role(gm, "start"),
        find_role(gm, "num_emitted"),
    )
    tokens, lengths = find_role(gm, "tokens_RS"), find_role(gm, "seq_len_R")
    if ctx.phase == "decode":
        bonus, length = emit(
            gm,
            _decode_result,
            target,
            start,
            count,
            before=before,
            max_seq_len=ctx.config.max_seq_len,
        )
    else:
        bonus, length = target, start
    parts = (bonus, find_role(gm, "drafts")) if has_role(gm, "drafts") else (bonus,)
    emit(gm, _write, tokens, lengths, index, length, *parts, before=before)
    if has_role(gm, "parents"):
        topology = add_buffer(gm, ctx, parent_rows(ctx.config))
        emit(gm, write_rows, topology, index, find_role(gm, "parents"), before=before)
    return 1


def commit_drafts(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Write new drafts after each request's last token.  The rows, int32 [B, S], are the graph's
    output `tokens_BS`.  Numerics: exact.  Torch IR.
    """
    tokens = add_buffer(gm, ctx, token_rows(ctx.config))
    rows = emit(
        gm, replace_drafts, tokens, find_role(gm, "row_index"), find_role(gm, "drafts"),
        before=output_node(gm), keeps_found=ctx.capabilities.combines,
    )  # fmt: skip
    set_outputs(gm, {"tokens_BS": rows})
    return 1


def replace_drafts(tokens_RS: Any, index_B: Any, drafts_BK: Any, *, keeps_found: bool) -> Any:
    """Steps of K = 0 leave no drafts but those that a look-up found, which may stay."""
    rows_BS = tokens_RS[index_B]
    if keeps_found:
        drafts_BK = torch.where(rows_BS[:, 1:2] >= 0, rows_BS[:, 1:], drafts_BK)
    rows_BS = torch.cat([rows_BS[:, :1], drafts_BK], 1)
    tokens_RS.index_put_((index_B,), rows_BS)
    return rows_BS


def write_rows(rows_RN: Any, index_B: Any, values_BN: Any) -> Any:
    return rows_RN.index_put_((index_B,), values_BN)


def _decode_result(
    target_BS: Any, start_B: Any, count_B: Any, *, max_seq_len: int
) -> tuple[Any, Any]:
    bonus_B1 = target_BS.gather(1, (count_B - 1).long().unsqueeze(1))
    return bonus_B1, (start_B + count_B).clamp(max=max_seq_len)


def _write(tokens_RS: Any, seq_len_R: Any, index_B: Any, length_B: Any, *parts: Any) -> Any:
    tokens_RS.index_put_((index_B,), torch.cat(parts, 1) if len(parts) > 1 else parts[0])
    return seq_len_R.index_put_((index_B,), length_B)
