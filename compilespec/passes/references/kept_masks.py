"""Makes a model's own masks from the dense history of each request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Attention, Before, Case, Mixers, Tokens, Values
from compilespec.passes.references.placement import place_call
from compilespec.program import ProgramConfig

MASK_CACHES = "cache.target.mask."


def mask_parts(
    caches: MutableMapping[str, Tensor],
    config: ProgramConfig,
    tokens: Tokens,
    block_table_RM: Tensor,
    owner: str = "target",
) -> Mixers:
    """The markers `cached`, which writes to the i-th of `owner`'s `caches`, and `all_positions`.

    Tokens of an entry of the batch are of one request; what nobody has written is 0.
    """
    length = config.blocks_per_row * config.block_size

    def positions(index: int, args: tuple[Any, ...]) -> Tensor:
        return torch.arange(length, device=block_table_RM.device)

    return {
        "cached": _cached(caches, tokens, block_table_RM, length, f"cache.{owner}.mask."),
        "all_positions": positions,
    }


def _cached(
    caches: Mapping[str, Tensor],
    tokens: Tokens,
    block_table_RM: Tensor,
    length: int,
    prefix: str,
) -> Attention:
    def read(index: int, args: tuple[Any, ...]) -> Tensor:
        x, dim = args
        cache = caches[f"{prefix}{index}"]
        cells, block_size = cache.flatten(0, 1), cache.shape[1]
        new = x.movedim(dim, 1)
        for b, slots in enumerate(tokens.slot.tolist()):
            for s, slot in enumerate(slots):
                if slot >= 0:
                    cells[slot] = new[b, s].reshape(cells.shape[1:])
        every = new.new_zeros((new.shape[0], length, *new.shape[2:]))
        for b, rows in enumerate(tokens.row.tolist()):
            live = [s for s, row in enumerate(rows) if row >= 0]
            last = max((int(tokens.position[b, s]) for s in live), default=-1)
            for position in range(last + 1):
                block = int(block_table_RM[rows[live[0]], position // block_size])
                cell = cells[block * block_size + position % block_size]
                every[b, position] = cell.reshape(new.shape[2:])
        return every.movedim(1, dim)

    return read


def insert_cached_keys(before: Before, ctx: PassContext, case: Case) -> Values:
    """Each request's entries, one position after the other, and the new ones at their slots."""
    tokens = place_call(ctx.config, case).tokens
    caches = {n: t.clone() for n, t in case.inputs.items() if n.startswith(MASK_CACHES)}
    parts = mask_parts(caches, ctx.config, tokens, case.inputs["block_table_RM"])
    values = before(case.inputs, parts)
    return dataclasses.replace(values, buffers={**values.buffers, **caches})


__all__ = ["MASK_CACHES", "insert_cached_keys", "mask_parts"]
