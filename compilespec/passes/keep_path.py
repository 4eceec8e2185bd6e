"""Goes on with the accepted path of a tree, as if it had been a chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.graph import arange_like, emit, find_role, output_node
from compilespec.passes.read_state import place
from compilespec.passes.trees import taken_rows
from compilespec.tracing.structure import shape_of

PATH = 14  # argument of paged_attention


def keep_path(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Write the accepted rows' keys and values to the target's caches, each at its position, and
    give the roles `position`, `row`, `slot` ([B, P]) and `aux.*` ([B, P, D]) to the rows of the
    accepted path.  What comes after it sees a chain of P = K + 1 rows.

    Returns: caches written.  Numerics: exact.  Torch IR.
    """
    end, taken = output_node(gm), find_role(gm, "taken")
    slot = emit(
        gm, accepted_slots, find_role(gm, "slot"), taken, find_role(gm, "num_emitted"), before=end,
        num_tokens=ctx.config.num_verify_tokens, num_path=ctx.config.num_step_tokens,
    )  # fmt: skip
    op, count = torch.ops.compilespec.paged_attention.default, 0
    for node in list(gm.graph.find_nodes(op="call_function", target=op)):
        if len(node.args) > PATH:
            with gm.graph.inserting_before(end):
                gm.graph.call_function(
                    torch.ops.compilespec.write_cache.default, (*node.args[1:5], slot)
                )
            count += 1
    chain = emit(
        gm, chain_places, find_role(gm, "start"), find_role(gm, "row_index"),
        find_role(gm, "live"), find_role(gm, "block_table_RM"), before=end,
        num_tokens=ctx.config.num_step_tokens, max_seq_len=ctx.config.max_seq_len,
        block_size=ctx.config.block_size,
    )  # fmt: skip
    for role, node in zip(("position", "row", "slot"), chain, strict=True):
        _hand_on(gm, role, node)
    for index in range(len(ctx.aux_layers)):
        tap = find_role(gm, f"aux.{index}")
        width = (shape_of(tap) or (None,))[-1]
        if width is None:
            raise PassError(f"aux.{index} has no known width, and its rows cannot be chosen")
        _hand_on(gm, f"aux.{index}", taken_rows(gm, tap, int(width), before=end))
    return count


def accepted_slots(
    slot_BS: Any, taken_BP: Any, num_emitted_B: Any, *, num_tokens: int, num_path: int
) -> Any:
    """The slots of rows on the accepted path; -1 of the others."""
    is_row_BPS = taken_BP.unsqueeze(2) == arange_like(taken_BP, num_tokens)
    is_path_BP = arange_like(taken_BP, num_path) < num_emitted_B.unsqueeze(1)
    is_kept_BS = (is_row_BPS & is_path_BP.unsqueeze(2)).any(1)
    return torch.where(is_kept_BS, slot_BS, -1)


def chain_places(
    start_B: Any, index_B: Any, live_B: Any, block_table_RM: Any, *, num_tokens: int,
    max_seq_len: int, block_size: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Position, row and slot of tokens from `start` on, as `read_state` gives them to a chain."""
    row_B = torch.where(live_B, index_B, -1).to(torch.int32)
    wanted_BP = start_B.unsqueeze(1) + arange_like(start_B, num_tokens)
    return place(
        wanted_BP, row_B.unsqueeze(1), index_B.unsqueeze(1), live_B.unsqueeze(1), block_table_RM,
        max_seq_len=max_seq_len, block_size=block_size,
    )  # fmt: skip


def _hand_on(gm: fx.GraphModule, role: str, node: fx.Node) -> None:
    del find_role(gm, role).meta["role"]
    node.meta["role"] = role
