"""Parallel drafting: one pass over true and masked rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.passes.references.base import Tokens, Values
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.passes.references.draft_loops.recycled import committed_rows
from compilespec.passes.references.placement import place_tokens
from compilespec.passes.references.trees import unwritten


def parallel(draft: Drafts, values: Values) -> Tensor:
    """One pass over the masked rows and the true ones; in prefill, one over each."""
    num_masked = draft.config.num_draft_tokens - 1
    (hidden,) = draft.call("combine", aux=values.roles["aux"])
    one_pass = num_masked and draft.case.phase == "decode"
    run = _together if one_pass else _apart
    return draft.propose_all(run(draft, values, hidden, num_masked))


def _apart(draft: Drafts, values: Values, hidden: Tensor, num_masked: int) -> Tensor:
    roles, tokens = values.roles, draft.placed.tokens
    head, _ = draft.call(
        "forward",
        tokens,
        input_ids=roles["draft_ids"],
        position_ids=tokens.position,
        hidden=hidden,
    )
    head, _, start = committed_rows(draft, roles, head, head)
    heads = [head.unsqueeze(1)]
    if num_masked:
        masked, ids, hidden = _masked(draft, start, num_masked)
        rest, _ = draft.call(
            "forward",
            masked,
            sights=[(masked_paths(masked, 0),)],
            input_ids=ids,
            position_ids=masked.position,
            hidden=hidden,
        )
        heads.append(rest)
    return torch.cat(heads, 1)


def _together(draft: Drafts, values: Values, hidden: Tensor, num_masked: int) -> Tensor:
    roles, tokens = values.roles, draft.placed.tokens
    counts = roles["num_emitted"].tolist()
    start = [s + n for s, n in zip(draft.placed.start.tolist(), counts, strict=True)]
    masked, masked_ids, masked_hidden = _masked(draft, start, num_masked)
    position, row, slot = (
        torch.cat([getattr(masked, name), getattr(tokens, name)], 1)
        for name in ("position", "row", "slot")
    )
    head, _ = draft.call(
        "forward",
        Tokens(position=position, row=row, slot=slot),
        sights=[(masked_paths(masked, tokens.row.shape[1]),)],
        input_ids=torch.cat([masked_ids, roles["draft_ids"]], 1),
        position_ids=position,
        hidden=torch.cat([masked_hidden, hidden], 1),
    )
    newest = torch.stack([head[b, num_masked + n - 1] for b, n in enumerate(counts)])
    return torch.cat([newest.unsqueeze(1), head[:, :num_masked]], 1)


def _masked(draft: Drafts, start: Sequence[int], count: int) -> tuple[Tokens, Tensor, Tensor]:
    """Places of masked rows, which write nothing, and what the drafter takes there."""
    placed = place_tokens(
        draft.config,
        draft.case.inputs,
        [[row] * count for row in draft.state_rows()],
        [[first + i for i in range(count)] for first in start],
    )
    ids, hidden = draft.call("mask", position_ids=placed.position)
    return unwritten(placed), ids, hidden


def masked_paths(masked: Tokens, num_true: int) -> Tensor:
    """Each masked row sees those before it and itself; true rows read the caches alone."""
    batch, count = masked.row.shape
    paths = [[j if j <= i else -1 for j in range(count)] for i in range(count)]
    paths += [[-1] * count] * num_true
    return masked.row.new_tensor([paths] * batch)
