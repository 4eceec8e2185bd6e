"""Parallel drafting: one pass of the drafter gives all K drafts, whose later rows hold a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.passes.splice.builder import Splice, arange_like, node_of
from compilespec.passes.splice.draft_loops.calls import next_position, run
from compilespec.passes.splice.insert_paged_attention import Branches
from compilespec.passes.splice.places import Places, step_places, unwritten
from compilespec.passes.splice.rows import take_newest
from compilespec.passes.splice.sampling import Proposal, draft_token
from compilespec.tracing.capture import output_widths


def parallel(step: Splice) -> int:
    """Decode: one pass over K-1 masked rows, which follow the last committed one, and the S rows.
    Prefill: one over the T rows, and one over the masked rows of each request.

    A masked row sees the committed rows in the caches and, by a path, the masked rows before it;
    it writes nothing, so that the next step finds true rows alone.  Makes the role `drafts` ([B,
    K], int32).  Source: requirement S8; Hui et al. 2026 (P-EAGLE).
    """
    start = next_position(step)
    head = _one_pass(step, start) if step.is_decode else _prompt_passes(step, start)
    step.roles.drafts = propose_all(step, head, start, step.config.num_draft_tokens)
    return num_parallel_passes(step.ctx)


def num_parallel_passes(ctx: PassContext) -> int:
    """Passes of the drafter that `parallel` splices."""
    return 1 if ctx.phase == "decode" or ctx.config.num_draft_tokens == 1 else 2


def _one_pass(step: Splice, start: Tensor) -> Tensor:
    """What the head takes of the last committed row and of the masked ones, [B, K, D]."""
    num_masked, (ids, hidden, places) = step.config.num_draft_tokens - 1, _true_rows(step)
    if num_masked == 0:
        (head,) = take_newest(step, _run(step, ids, hidden, places))
        return head
    masked_ids, masked_hidden, ahead = _masked_rows(step, start, num_masked)
    ids, hidden, slot, row, position, path = put_first(
        (masked_ids, masked_hidden, *ahead[:3]), (ids, hidden, *places[:3]), num_masked=num_masked
    )
    head = _run(step, ids, hidden, Places(slot, row, position, places.table), path)
    width = output_widths(step.ctx.draft["forward"])[0]
    return newest_and_masked(head, step.roles.num_emitted, num_masked=num_masked, width=width)


def _prompt_passes(step: Splice, start: Tensor) -> Tensor:
    """The same after a prompt: packed rows and rows of requests do not mix in one call."""
    num_masked = step.config.num_draft_tokens - 1
    (head,) = take_newest(step, _run(step, *_true_rows(step)))
    if num_masked == 0:
        return head
    ids, hidden, places = _masked_rows(step, start, num_masked)
    path = masked_paths(places.position, num_masked=num_masked)
    return torch.cat((head, _run(step, ids, hidden, places, path)), 1)


def _true_rows(step: Splice) -> tuple[Tensor, Tensor, Places]:
    """Ids, hidden states and places of the rows that the target has given."""
    (hidden,) = step.fragment("combine", aux=step.roles.aux)
    return step.roles.draft_ids, hidden, step_places(step)


def _masked_rows(step: Splice, start: Tensor, num_masked: int) -> tuple[Tensor, Tensor, Places]:
    """The same of the masked rows, at `start` and the positions after it."""
    places = unwritten(step, start.unsqueeze(1) + arange_like(start, num_masked))
    ids, hidden = step.fragment("mask", position_ids=places.position)
    return ids, hidden, places


def _run(
    step: Splice, ids: Tensor, hidden: Tensor, places: Places, path: Tensor | None = None
) -> Tensor:
    """Splice one pass of the drafter over its caches; returns what the head takes."""
    branches = None if path is None else Branches(path=path)
    head, _ = run(step, "forward", places, branches=branches, input_ids=ids, hidden=hidden)
    return head


def propose_all(
    step: Splice, head: Tensor, start: Tensor, count: int, *, argument: str = "head_input"
) -> Tensor:
    """The drafts [B, count] of one call of "propose" on [B, count, D]; draft i is for start + i."""
    token, *offered = step.fragment("propose", **{argument: head.flatten(0, 1)})
    if step.ctx.greedy_only or not offered:
        return token.unflatten(0, (-1, count))
    logits, *ids = offered
    drafts = []
    for number in range(1, count + 1):
        best, own = (take_draft(x, number, count) for x in (token, logits))
        drafts.append(draft_token(step, Proposal(best, own, *ids), start, number))
    return torch.stack(drafts, 1)


def take_draft(source: Tensor, number: int, count: int) -> Tensor:
    """The rows of draft `number`, [B, ..], among those of all drafts, [B * K, ..]."""
    taken, example = source.unflatten(0, (-1, count)).select(1, number - 1), node_of(source).meta
    if "example" in example:
        node_of(taken).meta["example"] = example["example"]
    return taken


def masked_paths(position_BM: Tensor, *, num_masked: int) -> Tensor:
    """Masked row i sees masked rows 0 to i: [B, M, M]."""
    at_M = arange_like(position_BM, num_masked)
    path_MM = torch.where(at_M <= at_M.unsqueeze(1), at_M, -1)
    return torch.zeros_like(position_BM).unsqueeze(2) + path_MM


def put_first(
    masked: tuple[Tensor, ...], true: tuple[Tensor, ...], *, num_masked: int
) -> tuple[Tensor, ...]:
    """Ids, hidden states, slots, rows and positions of the masked rows with those of the true rows
    behind them, and the paths of all, [B, M + S, M].
    """
    path_BMM = masked_paths(masked[-1], num_masked=num_masked)
    none_BSM = torch.full_like(true[-1].unsqueeze(2).expand(-1, -1, num_masked), -1)
    joined = (torch.cat(pair, 1) for pair in zip(masked, true, strict=True))
    return (*joined, torch.cat([path_BMM, none_BSM], 1))


def newest_and_masked(
    x_BSD: Tensor, num_emitted_B: Tensor, *, num_masked: int, width: int
) -> Tensor:
    """The last committed row of each request and its masked rows, [B, K, D]."""
    newest_B1 = (num_emitted_B + (num_masked - 1)).long().unsqueeze(1)
    newest_B1D = x_BSD.gather(1, newest_B1.unsqueeze(2).expand(-1, -1, width))
    return torch.cat([newest_B1D, x_BSD[:, :num_masked]], 1)
