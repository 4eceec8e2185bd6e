"""Drafting in place: single-token passes over the caches that the target has just written."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.references.base import Values
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.program import LONG_ROPE, ROPE_OFFSETS, ROPE_ROWS


def in_place(draft: Drafts, values: Values) -> Tensor:
    """The newest token at its position, then each draft at the one after."""
    for name, cache in values.buffers.items():
        if name.startswith(("cache.target.", "recurrence.target.", "causal_conv.target.")):
            draft.buffers[name] = cache.clone()
    roles, first = values.roles, draft.newest()
    if draft.case.phase == "decode":
        counts = roles["num_emitted"].tolist()
        token = torch.stack([roles["target"][b, n - 1] for b, n in enumerate(counts)])
    else:
        token = roles["target"][:, 0]
    start = draft.placed.start.tolist()
    held = [at + 1 for at in start] if draft.case.phase == "decode" else start
    progress = draft.progress(held, [0] * len(held))
    drafts: list[Tensor] = []
    for number in range(draft.config.num_draft_tokens):
        tokens = draft.single([position + number for position in first])
        (logits,) = draft.call(
            "forward",
            tokens,
            owner="target",
            progress=progress,
            sights=(),
            input_ids=draft.ids(token),
            position_ids=tokens.position,
            **_of_requests(draft, tokens.position),
        )
        (token,) = draft.call("propose", logits_BV=logits[:, 0])
        drafts.append(token)
    return torch.stack(drafts, 1)


def _of_requests(draft: Drafts, position_B1: Tensor) -> dict[str, Tensor]:
    arguments, found = draft.ctx.draft["forward"].arguments, dict[str, Tensor]()
    rows = draft.placed.row_index.tolist()
    if ROPE_OFFSETS in arguments:
        deltas = [[int(draft.case.inputs["rope_delta_R"][row])] for row in rows]
        found[ROPE_OFFSETS] = torch.tensor([deltas] * ROPE_ROWS, dtype=torch.int32)
    if LONG_ROPE in arguments:
        are_long = [[bool(draft.case.inputs["long_rope_R"][row] > 0)] for row in rows]
        found[LONG_ROPE] = torch.tensor(are_long)
    return found
