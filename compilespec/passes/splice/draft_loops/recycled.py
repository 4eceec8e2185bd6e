"""Recycled drafting: one drafter, reused; each pass reads the hidden state of the pass before."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.calls import next_position, propose, run, single_token
from compilespec.passes.splice.draft_loops.tree import Growth, grow_tree, parents_hidden
from compilespec.passes.splice.draft_loops.tree_parts import TreeNodes
from compilespec.passes.splice.places import live_row, step_places
from compilespec.passes.splice.rows import take_newest
from compilespec.tracing.capture import output_widths


def recycled(step: Splice) -> int:
    """Splice one pass over the S (or T) rows, a gather of the last committed row, and K-1
    single-token passes.

    Row j of the first pass writes slot seq_len + j; single passes continue from seq_len + n with
    the previous pass's output as hidden state.  Makes the role `drafts` ([B, K], int32).
    Source: requirements M11, A9, A10, E5.
    """
    roles, places = step.roles, step_places(step)
    (hidden,) = step.fragment("combine", aux=roles.aux)
    head, hidden = run(step, "forward", places, input_ids=roles.draft_ids, hidden=hidden)
    start = next_position(step)
    head, hidden = take_newest(step, head, hidden)
    if step.config.tree is not None:
        return 1 + _grow(step, head, hidden, start)
    drafts = [propose(step, head.squeeze(1), start, 1)]
    row = live_row(step)
    for number in range(1, step.config.num_draft_tokens):
        ids, places = single_token(step, drafts[-1], start, row, number)
        head, hidden = run(step, "forward", places, input_ids=ids, hidden=hidden)
        drafts.append(propose(step, head.squeeze(1), start, number + 1))
    roles.drafts = torch.stack(drafts, 1)
    return len(drafts)


def _grow(step: Splice, head: Tensor, hidden: Tensor, start: Tensor) -> int:
    """A tree of drafts from the last committed row, whose next one is at `start`."""
    width = output_widths(step.ctx.draft["forward"])[1]

    def advance(nodes: TreeNodes) -> Tensor:
        nonlocal hidden
        before = parents_hidden(nodes, hidden, width)
        head, hidden = run(
            step,
            "forward",
            nodes.places,
            branches=nodes.branches,
            input_ids=nodes.ids.clamp(min=0),
            hidden=before,
        )
        return head

    return grow_tree(step, head, "head_input", Growth(start, start + 1, advance))
