"""Unshifted drafting: a separate causal model, which sees each token at its own position."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like
from compilespec.passes.splice.draft_loops.calls import run, single_token
from compilespec.passes.splice.draft_loops.tree import Growth, grow_tree
from compilespec.passes.splice.draft_loops.tree_parts import TreeNodes
from compilespec.passes.splice.insert_paged_attention import Branches
from compilespec.passes.splice.places import Places, live_row, place_rows, requests, step_places
from compilespec.passes.splice.recurrent_state import StatePlaces, keep_states
from compilespec.passes.splice.rows import take_newest
from compilespec.passes.splice.sampling import Proposal, draft_token
from compilespec.program import markers


def unshifted(step: Splice) -> int:
    """Draft with token x_p in slot p of the drafter's cache.  Makes the role `drafts` ([B, K],
    int32).

    Decode: the S target tokens at seq_len+1 .. seq_len+S (slots after the bonus token are written
    again before anything attends to them); row n-1 gives draft 1; then K-1 single tokens from
    seq_len+n+1.  Prefill: the prompt at its positions, then K single tokens, the sampled one first.
    """
    roles = step.roles
    drafts: list[Tensor] = []
    if step.is_decode:
        (logits,) = take_newest(step, _all_rows(step))
        if step.config.tree is not None:
            return 1 + _grow(step, logits, roles.start + roles.num_emitted + 1)
        row = logits.squeeze(1)
        first = roles.start + roles.num_emitted + 1
        token = _propose(step, row, first, 0)
        drafts.append(token)
    else:
        _run(step, step_places(step), roles.ids, _prompt_state)
        token, first = roles.target.squeeze(1), roles.start
        if step.config.tree is not None:
            return 2 + _grow(step, _next_logits(step, token, first, 0), first + 1)
    num_singles = step.config.num_draft_tokens - len(drafts)
    for index in range(num_singles):
        logits = _next_logits(step, token, first, index)
        token = _propose(step, logits.squeeze(1), first, index + 1)
        drafts.append(token)
    roles.drafts = torch.stack(drafts, 1)
    return num_singles + 1


def num_unshifted_passes(ctx: PassContext) -> int:
    """Number of passes: K in decode; in prefill the prompt's pass and K single ones."""
    return ctx.config.num_draft_tokens + (ctx.phase == "prefill")


def _all_rows(step: Splice) -> Tensor:
    """The pass over the step's tokens; returns its logits, [B, S, V]."""
    ids, places = emitted_rows(step)
    return _run(step, places, ids, _emitted_state, step.roles.start, step.roles.num_emitted)


def emitted_rows(step: Splice) -> tuple[Tensor, Places]:
    """Ids [B, S] and places of the target's tokens in decode, those that are not emitted included;
    in a replay, of the tokens that were kept.
    """
    roles = step.roles
    if step.ctx.is_replay:
        return roles.draft_ids, step_places(step)
    ids, position, row, slot = step.call(
        shifted_rows, roles.target, roles.start, live_row(step), *requests(step)
    )
    return ids, Places(slot, row, position, roles.block_table_RM)


def shifted_rows(
    target_BS: Tensor,
    start_B: Tensor,
    row_B: Tensor,
    index_B: Tensor,
    live_B: Tensor,
    block_table_RM: Tensor,
    *,
    num_step_tokens: int,
    max_seq_len: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token j has position start + 1 + j.  Returns ids, position, row, slot, [B, S]."""
    wanted_BS = (start_B + 1).unsqueeze(1) + arange_like(start_B, num_step_tokens)
    position, row, slot = place_rows(
        wanted_BS,
        row_B,
        index_B,
        live_B,
        block_table_RM,
        max_seq_len=max_seq_len,
        block_size=block_size,
    )
    return target_BS.clamp(min=0), position, row, slot


def _grow(step: Splice, logits: Tensor, first: Tensor) -> int:
    """A tree of drafts after the logits [B, 1, V], the first ones at position `first`."""

    def advance(nodes: TreeNodes) -> Tensor:
        ids = nodes.ids.clamp(min=0)
        return _run(step, nodes.places, ids, _prompt_state, branches=nodes.branches)

    return grow_tree(step, logits, "logits_BV", Growth(first, first, advance))


def _next_logits(step: Splice, token: Tensor, first: Tensor, index: int) -> Tensor:
    """The logits [B, 1, V] after one token per request, at position first + index."""
    ids, places = single_token(step, token, first, live_row(step), index + 1)
    num_emitted = 0 if step.is_decode else 1  # the first token after the prompt is no draft
    if index < num_emitted:
        return _run(step, places, ids, _prompt_state)
    return _run(step, places, ids, _drafted_state, first, num_emitted)


def _run(
    step: Splice,
    places: Places,
    ids: Tensor,
    state: Callable[..., tuple[Tensor, Tensor]],
    *known: Tensor | int,
    branches: Branches | None = None,
) -> Tensor:
    """Splice one pass of the model over the drafter's caches; returns its logits.

    Args:
        ids: the target's; a drafter of another vocabulary has a call "translate" for them.
        state: gives a recurrent drafter's `absorbed` and `commits` (`StatePlaces`), called with the
            positions and what is `known`.
    """
    (logits,) = run(step, "forward", places, branches=branches, input_ids=translated(step, ids))
    if step.ctx.draft["forward"].num_recurrent_markers:
        with step.before(markers(step.gm, "recurrence", "causal_conv")[0]):
            absorbed, commits = state(places.position, *known)
        at = StatePlaces(
            row=places.row, position=places.position, absorbed=absorbed, commits=commits
        )
        keep_states(step, "draft", at)
    return logits


def _prompt_state(position_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The model's state holds all tokens before these, which are the request's for good."""
    return position_BS, position_BS >= 0


def _emitted_state(
    position_BS: Tensor, start_B: Tensor, num_emitted_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The step before, or prefill, took the token at `start`; of the target's tokens n are kept."""
    absorbed_B1 = (start_B + 1).unsqueeze(1)
    commits_BS = position_BS < absorbed_B1 + num_emitted_B.unsqueeze(1)
    return absorbed_B1 + torch.zeros_like(position_BS), commits_BS


def _drafted_state(position_B1: Tensor, first_B: Tensor, num_emitted: int) -> tuple[Tensor, Tensor]:
    """Drafts after the last emitted token, the one before position first + num_emitted."""
    return (first_B + num_emitted).unsqueeze(1) + torch.zeros_like(position_B1), position_B1 < 0


def _propose(step: Splice, logits: Tensor, first: Tensor, offset: int) -> Tensor:
    """The draft for position first + offset."""
    proposal = Proposal(*step.fragment("propose", logits_BV=logits))
    return draft_token(step, proposal, first, offset, number=offset + step.is_decode)


def translated(step: Splice, ids: Tensor) -> Tensor:
    """The draft model's ids for the target's, where its vocabulary is another."""
    if "translate" in step.ctx.draft:
        (ids,) = step.fragment("translate", input_ids=ids)
    return ids
