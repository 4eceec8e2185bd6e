"""What draft loops share: passes of the drafter, proposals, and where their tokens belong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.errors import NotSupported
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.insert_cached_keys import cache_keys
from compilespec.passes.splice.insert_paged_attention import Branches, page_markers
from compilespec.passes.splice.places import Places, place_rows, requests
from compilespec.passes.splice.rows import take_newest
from compilespec.passes.splice.sampling import Proposal, draft_token
from compilespec.program import markers


def run(
    step: Splice,
    call: str,
    places: Places,
    *,
    caches: str = "draft",
    layers: Sequence[int] | None = None,
    block_size: int | None = None,
    branches: Branches | None = None,
    **arguments: Tensor,
) -> tuple[Tensor, ...]:
    """Splice one pass of the drafter, at these places, over its caches; see `page_markers`."""
    outputs = step.fragment(call, position_ids=places.position, **arguments)
    if kept := markers(step.gm, "cached", "all_positions"):
        _check_prefills(step)
        cache_keys(step, kept, caches, places)
    page_markers(
        step,
        markers(step.gm),
        caches,
        places,
        layers=layers,
        block_size=block_size,
        branches=branches,
    )
    return outputs


def _check_prefills(step: Splice) -> None:
    """Raises: NotSupported where a prefill call holds tokens of several requests, of which a mask
    over cached keys can serve one.
    """
    if not step.config.prefills_one:
        raise NotSupported(
            "a drafter that chooses keys by an indexer needs a target that does: give the drafter "
            "of another target"
        )


def propose(
    step: Splice, row: Tensor, base: Tensor, number: int, *, call: str = "propose"
) -> Tensor:
    """Draft `number`, 1 to K, for position base + number, from what the drafter's head takes."""
    return draft_token(step, Proposal(*step.fragment(call, head_input=row)), base, number)


# --- tokens ---


def next_position(step: Splice) -> Tensor:
    """The position after the last committed row of each request, [B]."""
    roles = step.roles
    return roles.start + roles.num_emitted if step.is_decode else roles.start


def newest_token(step: Splice) -> Tensor:
    """The last token of each request's step, or the one after its prompt, [B]."""
    if step.is_decode:
        return bonus_token(step.roles.target, step.roles.num_emitted)
    return step.roles.target.squeeze(1)


def bonus_token(target_BS: Tensor, num_emitted_B: Tensor) -> Tensor:
    """The last token of each request's step, [B]."""
    return target_BS.gather(1, (num_emitted_B - 1).long().unsqueeze(1)).squeeze(1)


def newest_hidden(step: Splice) -> Tensor:
    """The target's taps at the last committed row, concatenated: [B, A*D]."""
    (row_B1E,) = take_newest(step, torch.cat(step.taps(), -1))
    return row_B1E.squeeze(1)


# --- places ---


def single_token(
    step: Splice, token: Tensor, start: Tensor, row: Tensor, number: int
) -> tuple[Tensor, Places]:
    """Ids [B, 1] and places of single pass `number`, 1, 2, ..; see `next_token`."""
    ids, position, rows, slot = step.call(
        next_token, token, start, row, *requests(step), number=number
    )
    return ids, Places(slot, rows, position, step.roles.block_table_RM)


def next_token(
    token_B: Tensor,
    start_B: Tensor,
    row_B: Tensor,
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    number: int,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of single pass `number`: ids, position, row and slot, all [B, 1]."""
    wanted_B1 = (start_B + (number - 1)).unsqueeze(1)
    position, row, slot = place_rows(
        wanted_B1,
        row_B,
        index_B,
        live_B,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return token_B.clamp(min=0).unsqueeze(1), position, row, slot
