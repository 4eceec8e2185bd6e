"""KV groups: drafter layers whose cache has its own block size, or a ring for a window.

The blocks of such a group are assigned to the state rows when the program is built, so its block
table is a constant that costs the host nothing.  A layer with a window keeps only as many blocks
per row as its window and the tokens of one call need, used in turn; a layer without one keeps
`max_seq_len` tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.places import Places
from compilespec.program import ProgramConfig


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers of one block size and one window (0: none)."""

    block_size: int
    window: int

    def blocks_per_row(self, config: ProgramConfig) -> int:
        """Blocks of a state row: for all of its positions, or a ring for its window.

        A call writes all its keys before it reads any: at most `max_prefill_tokens` of a request,
        or 2K+1.
        """
        whole = -(-config.max_seq_len // self.block_size)
        if not self.window:
            return whole
        longest_call = max(config.max_prefill_tokens, 2 * config.num_draft_tokens + 1)
        return min(whole, -(-(self.window + longest_call) // self.block_size) + 1)

    def num_blocks(self, config: ProgramConfig) -> int:
        return config.max_batch_size * self.blocks_per_row(config)

    def table(self, config: ProgramConfig) -> Tensor:
        """The block table, int32 [rows + 1, blocks of max_seq_len]; the spare row has none."""
        count = self.blocks_per_row(config)
        row = torch.arange(config.max_batch_size, dtype=torch.int32).unsqueeze(1) * count
        number = torch.arange(-(-config.max_seq_len // self.block_size), dtype=torch.int32)
        table = torch.cat([row + number % count, torch.full((1, len(number)), -1)])
        return table.to(dtype=torch.int32, device=config.device)


def group_places(step: Splice, group: KVGroup, places: Places) -> Places:
    """Places of the same tokens in the cache of `group`, with its slots and its block table."""
    name = f"kv_group.{group.block_size}.{group.window}.block_table"
    known = step.ctx.weights.get(name)
    table = step.weight(name, group.table(step.config) if known is None else known)
    slot = group_slots(places.row, places.position, table, block_size=group.block_size)
    return places._replace(slot=slot, table=table)


def group_slots(row: Tensor, position: Tensor, table_RM: Tensor, *, block_size: int) -> Tensor:
    """Flat cache index of each token, -1 if its row is -1."""
    block = table_RM[row.clamp(min=0).long(), (position // block_size).long()]
    slot = block * block_size + position % block_size
    return torch.where(row >= 0, slot, -1).to(torch.int32)
