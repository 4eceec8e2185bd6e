"""Masked drafting: a separate causal model; masked rows draft in the pass of the true ones."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.references.base import Tokens, Values
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.passes.references.draft_loops.parallel import masked_paths
from compilespec.passes.references.draft_loops.unshifted import emitted, translated
from compilespec.passes.references.placement import place_tokens
from compilespec.passes.references.trees import unwritten


def masked(draft: Drafts, values: Values) -> Tensor:
    """One pass over masked rows and target tokens; in prefill, the prompt's before it."""
    config, roles = draft.config, values.roles
    start = draft.placed.start.tolist()
    if draft.case.phase == "decode":
        counts, (ids, true) = roles["num_emitted"].tolist(), emitted(draft, values)
    else:
        tokens = draft.placed.tokens
        _model(draft, tokens, translated(draft, draft.placed.ids))
        counts, ids = [0] * len(start), draft.ids(roles["target"][:, 0])
        true = draft.single(start)
    newest = [s + n for s, n in zip(start, counts, strict=True)]
    logits = _one_pass(draft, newest, true, translated(draft, ids))
    num_masked = config.num_draft_tokens - 1
    rows_of = [num_masked + max(n, 1) - 1 for n in counts]
    first = torch.stack([logits[b, row] for b, row in enumerate(rows_of)])
    every = torch.cat([first.unsqueeze(1), logits[:, :num_masked]], 1)
    drafts = [draft.call("propose", logits_BV=every[:, i])[0] for i in range(every.shape[1])]
    return torch.stack(drafts, 1)


def _one_pass(draft: Drafts, newest: list[int], true: Tokens, ids: Tensor) -> Tensor:
    """The logits of the masked rows, which follow the newest token, and of the true rows."""
    count = draft.config.num_draft_tokens - 1
    if not count:
        return _model(draft, true, ids)
    placed = place_tokens(
        draft.config,
        draft.case.inputs,
        [[row] * count for row in draft.state_rows()],
        [[first + 1 + i for i in range(count)] for first in newest],
    )
    (mask_ids,) = draft.call("mask", position_ids=placed.position)
    ahead = unwritten(placed)
    both = (
        torch.cat([getattr(ahead, name), getattr(true, name)], 1)
        for name in ("position", "row", "slot")
    )
    position, row, slot = both
    return _model(
        draft,
        Tokens(position=position, row=row, slot=slot),
        torch.cat([mask_ids, ids], 1),
        masked_paths(ahead, true.row.shape[1]),
    )


def _model(draft: Drafts, tokens: Tokens, ids: Tensor, paths: Tensor | None = None) -> Tensor:
    sights = () if paths is None else [(paths,)]
    (logits,) = draft.call(
        "forward", tokens, sights=sights, input_ids=ids, position_ids=tokens.position
    )
    return logits
