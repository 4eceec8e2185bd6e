"""Drafting in place: the target's own graph, made cheaper, continues the target's own caches."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from compilespec.passes.splice.add_adapters import change_products, numbers_kept, products_of
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.calls import (
    newest_token,
    next_position,
    run,
    single_token,
)
from compilespec.passes.splice.places import Places, live_row
from compilespec.passes.splice.read_long_rope import long_rope_rows, read_lengths
from compilespec.passes.splice.read_rope_offsets import decode_offsets, rope_deltas
from compilespec.passes.splice.recurrent_state import StatePlaces, keep_states
from compilespec.passes.splice.sampling import Proposal, draft_token
from compilespec.program import LONG_ROPE, ROPE_OFFSETS, markers


def in_place(step: Splice) -> int:
    """K single-token passes over the target's caches, the step's newest token first.  Makes the
    role `drafts` ([B, K], int32).

    The token at position p is written to slot p, from the newest token's position on: all these
    lie at or past the new length, and the next step writes each of them again before anything
    attends to it.  So the drafter has no cache and no prefill.  Torch IR.
    Source: Zhang et al. 2023 (Draft & Verify); Tiwari et al. 2025 (QuantSpec).
    """
    token, first, row = newest_token(step), next_position(step), live_row(step)
    drafts: list[Tensor] = []
    for number in range(1, step.config.num_draft_tokens + 1):
        ids, places = single_token(step, token, first, row, number)
        known = set(step.graph.nodes)
        (logits,) = run(
            step,
            "forward",
            places,
            caches="target",
            layers=step.ctx.drafter.target_layers["attention"],
            block_size=None,
            branches=None,
            input_ids=ids,
            **_of_requests(step, places, row),
        )
        _continue_states(step, places)
        _adapt(step, places, known)
        proposal = Proposal(*step.fragment("propose", logits_BV=logits.squeeze(1)))
        token = draft_token(step, proposal, first, number)
        drafts.append(token)
    step.roles.drafts = torch.stack(drafts, 1)
    return len(drafts)


def _continue_states(step: Splice, places: Places) -> None:
    """Let recurrent layers go on from the target's states; what they add is kept beside those, as
    of tokens that may be rejected.
    """
    found = markers(step.gm, "recurrence", "causal_conv")
    if not found:
        return
    num_committed = int(step.is_decode)  # of a step's tokens; prefill commits all before `start`
    with step.before(found[0]):
        absorbed, commits = kept_apart(
            places.position, step.roles.start, num_committed=num_committed
        )
    at = StatePlaces(row=places.row, position=places.position, absorbed=absorbed, commits=commits)
    keep_states(step, "target", at, step.ctx.drafter.target_layers)


def _adapt(step: Splice, places: Places, known: Collection[fx.Node]) -> None:
    """Change the products of the newest pass, whose nodes are not `known`, as adapters do those of
    the target.
    """
    shape = step.config.adapters
    if shape is None:
        return
    products = [node for node in products_of(step.graph, shape) if node not in known]
    if products:
        with step.before(products[0]):
            keeps = numbers_kept(step, shape, places.row, (None, 1))
        change_products(step, shape, products, keeps)


def kept_apart(
    position_B1: Tensor, start_B: Tensor, *, num_committed: int
) -> tuple[Tensor, Tensor]:
    """Tokens in the states of each request; that none of the call's commits."""
    held_B1 = (start_B + num_committed).unsqueeze(1)
    return held_B1 + torch.zeros_like(position_B1), position_B1 < 0


def _of_requests(step: Splice, places: Places, row: Tensor) -> dict[str, Tensor]:
    """Further arguments of the target's graph, which follow from the request."""
    arguments, found = step.ctx.draft["forward"].arguments, dict[str, Tensor]()
    if ROPE_OFFSETS in arguments:
        deltas = step.buffer(rope_deltas(step.config))
        found[ROPE_OFFSETS] = step.call(decode_offsets, row, deltas)
    if LONG_ROPE in arguments:
        lengths = step.buffer(long_rope_rows(step.config))
        found[LONG_ROPE] = step.call(read_lengths, places.row, lengths)
    return found
