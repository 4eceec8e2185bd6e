"""Block drafting: one pass over masked rows that see each other, on a context from the target."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.calls import newest_token, next_position
from compilespec.passes.splice.draft_loops.parallel import propose_all, take_draft
from compilespec.passes.splice.evidence import note_own_sureness
from compilespec.passes.splice.insert_paged_attention import Branches, cache_of, page_markers
from compilespec.passes.splice.places import unwritten
from compilespec.passes.splice.sampling import Proposal, draft_token
from compilespec.program import markers


def block(step: Splice) -> int:
    """Write the context of the committed rows, then splice one pass over the block that begins with
    the newest token.

    Keys and values of the context are the drafter's projections of the target's taps: of rejected
    rows none is written, and the block's rows, which see the context before the newest token and
    each other by paths, leave nothing.  Makes the role `drafts` ([B, K], int32), whose K is that of
    the program's largest.  Torch IR.  Source: Chen et al. 2026 (DFlash).
    """
    write_context(step)
    newest, token = next_position(step), newest_token(step)
    ids, position, *sights = step.fragment("block", token=token, position=newest)
    last = (newest - 1).clamp(min=0).unsqueeze(1)
    places = unwritten(step, last + torch.zeros_like(ids))
    (head,) = step.fragment("forward", input_ids=ids, position_ids=position)
    for layer, marker in enumerate(markers(step.gm)):
        first, path = sights[2 * layer : 2 * layer + 2]
        sight = Branches(path=path, first=first)
        page_markers(step, [marker], "draft", places, layers=[layer], branches=sight)
    count = step.config.num_row_tokens - 1
    if "follow" in step.ctx.draft:
        step.roles.drafts = _propose_in_turn(step, head, token, newest, count)
        return 1
    head = head[:, :count]
    step.roles.drafts = propose_all(step, head, newest, count)
    for number in range(1, count + 1):
        note_own_sureness(step, head, token, number, place=number - 1)
    return 1


def _propose_in_turn(
    step: Splice, head: Tensor, token: Tensor, newest: Tensor, count: int
) -> Tensor:
    """The drafts [B, count]: one product gives the logits of all rows, to which each draft adds
    what follows from the one before it.
    """
    drafts = []
    head, state = step.fragment("state", head_input=head, token=token)
    rows = head[:, :count].flatten(0, 1)
    (base,) = step.fragment("base", head_input=rows)
    for number in range(1, count + 1):
        row, logits = (take_draft(x, number, count) for x in (rows, base))
        features, state = step.fragment("follow", head_input=row, token=token, state=state)
        proposal = Proposal(*step.fragment("propose", base=logits, features=features))
        note_own_sureness(step, row, token, number)
        token = draft_token(step, proposal, newest, number)
        drafts.append(token)
    return torch.stack(drafts, 1)


def write_context(step: Splice) -> None:
    """Write keys and values of the committed rows to the drafter's caches."""
    roles, config = step.roles, step.config
    aux, slot = torch.cat(step.taps(), -1), roles.slot
    if step.is_decode:
        slot = step.call(committed_slots, slot, roles.num_emitted)
    parts = step.fragment("context", aux=aux, position_ids=roles.position)
    blocks = (config.num_blocks, config.block_size)
    for layer in range(len(parts) // 2):
        key, value = parts[2 * layer : 2 * layer + 2]
        keys = cache_of(step, f"draft.{layer}.key", key, blocks)
        values = cache_of(step, f"draft.{layer}.value", value, blocks)
        torch.ops.compilespec.write_cache.default(key, value, keys, values, slot)


def committed_slots(slot_BS: Tensor, num_emitted_B: Tensor, *, num_verify_tokens: int) -> Tensor:
    """The slots of the rows that stay, -1 of rejected ones."""
    is_kept_BS = arange_like(slot_BS, num_verify_tokens) < num_emitted_B.unsqueeze(1)
    return torch.where(is_kept_BS, slot_BS, -1)
