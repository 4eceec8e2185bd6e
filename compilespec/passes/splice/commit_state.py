"""Writes the step's result back into the state rows, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.read_state import token_rows
from compilespec.passes.splice.trees import parent_rows


def commit_state(step: Splice) -> int:
    """tokens_RS = [bonus | drafts], seq_len += n, for live rows; padded ones write the spare row.
    With a tree of drafts also parents_RS.

    The cache slots of rejected drafts lie past the new length: the next step writes them again
    before anything attends to them.

    A request whose prompt is continued in the next call commits nothing.  Numerics: exact.  Torch
    IR.
    """
    roles = step.roles
    bonus, length = roles.target, roles.start
    if step.is_decode:
        bonus, length = step.call(_decode_result, bonus, length, roles.num_emitted)
    drafts, parents = step.find("drafts"), step.find("parents")
    _write(roles.tokens_RS, roles.seq_len_R, roles.row_index, length, bonus, drafts)
    if parents is not None:
        write_rows(step.buffer(parent_rows(step.config)), roles.row_index, parents)
    return 1


def commit_drafts(step: Splice) -> int:
    """Write new drafts after each request's last token.  The rows, int32 [B, S], are the graph's
    output `tokens_BS`.  Numerics: exact.  Torch IR.
    """
    roles, tokens = step.roles, step.buffer(token_rows(step.config))
    keeps_found = step.ctx.capabilities.combines
    rows = replace_drafts(tokens, roles.row_index, roles.drafts, keeps_found=keeps_found)
    step.set_outputs({"tokens_BS": rows})
    return 1


def replace_drafts(
    tokens_RS: Tensor, index_B: Tensor, drafts_BK: Tensor, *, keeps_found: bool
) -> Tensor:
    """Steps of K = 0 leave no drafts but those that a look-up found, which may stay."""
    rows_BS = tokens_RS[index_B]
    if keeps_found:
        drafts_BK = torch.where(rows_BS[:, 1:2] >= 0, rows_BS[:, 1:], drafts_BK)
    rows_BS = torch.cat([rows_BS[:, :1], drafts_BK], 1)
    tokens_RS.index_put_((index_B,), rows_BS)
    return rows_BS


def write_rows(rows_RN: Tensor, index_B: Tensor, values_BN: Tensor) -> Tensor:
    return rows_RN.index_put_((index_B,), values_BN)


def _decode_result(
    target_BS: Tensor, start_B: Tensor, count_B: Tensor, *, max_seq_len: int
) -> tuple[Tensor, Tensor]:
    bonus_B1 = target_BS.gather(1, (count_B - 1).long().unsqueeze(1))
    return bonus_B1, (start_B + count_B).clamp(max=max_seq_len)


def _write(
    tokens_RS: Tensor,
    seq_len_R: Tensor,
    index_B: Tensor,
    length_B: Tensor,
    bonus_B1: Tensor,
    drafts_BK: Tensor | None,
) -> None:
    row_BS = bonus_B1 if drafts_BK is None else torch.cat((bonus_B1, drafts_BK), 1)
    tokens_RS.index_put_((index_B,), row_BS)
    seq_len_R.index_put_((index_B,), length_B)
