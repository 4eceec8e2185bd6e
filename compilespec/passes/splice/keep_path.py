"""Goes on with the accepted path of a tree, as if it had been a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.errors import PassError
from compilespec.passes.splice.builder import Splice, arange_like, node_of
from compilespec.passes.splice.places import place_rows, requests
from compilespec.passes.splice.trees import taken_rows
from compilespec.tracing.structure import shape_of

PATH = 14  # argument of paged_attention


def keep_path(step: Splice) -> int:
    """Write the accepted rows' keys and values to the target's caches, each at its position, and
    give the roles `position`, `row`, `slot` ([B, P]) and `aux.*` ([B, P, D]) to the rows of the
    accepted path.  What comes after it sees a chain of P = K + 1 rows.

    Returns: caches written.  Numerics: exact.  Torch IR.
    """
    roles, ops = step.roles, torch.ops.compilespec
    slot = step.call(accepted_slots, roles.slot, roles.taken, roles.num_emitted)
    attends = step.graph.find_nodes(op="call_function", target=ops.paged_attention.default)
    found = [node for node in attends if len(node.args) > PATH]
    for node in found:
        ops.write_cache.default(*step.values(node.args[1:5]), slot)
    roles.position, roles.row, roles.slot = step.call(chain_places, roles.start, *requests(step))
    for index, tap in enumerate(step.taps()):
        width = (shape_of(node_of(tap)) or (None,))[-1]
        if width is None:
            raise PassError(f"aux.{index} has no known width, and its rows cannot be chosen")
        step.name(f"aux.{index}", taken_rows(step, tap, int(width)))
    return len(found)


def accepted_slots(
    slot_BS: Tensor,
    taken_BP: Tensor,
    num_emitted_B: Tensor,
    *,
    num_verify_tokens: int,
    num_step_tokens: int,
) -> Tensor:
    """The slots of rows on the accepted path; -1 of the others."""
    is_row_BPS = taken_BP.unsqueeze(2) == arange_like(taken_BP, num_verify_tokens)
    is_path_BP = arange_like(taken_BP, num_step_tokens) < num_emitted_B.unsqueeze(1)
    is_kept_BS = (is_row_BPS & is_path_BP.unsqueeze(2)).any(1)
    return torch.where(is_kept_BS, slot_BS, -1)


def chain_places(
    start_B: Tensor,
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    num_step_tokens: int,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Position, row and slot of tokens from `start` on, as `read_state` gives them to a chain."""
    row_B = torch.where(live_B, index_B, -1).to(torch.int32)
    wanted_BP = start_B.unsqueeze(1) + arange_like(start_B, num_step_tokens)
    return place_rows(
        wanted_BP,
        row_B,
        index_B,
        live_B,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
