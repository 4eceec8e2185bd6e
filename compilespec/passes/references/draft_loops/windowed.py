"""Windowed drafting: each module over the pairs that end at the last committed row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compilespec.passes.references.base import Values
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.passes.references.placement import place_tokens


def windowed(draft: Drafts, values: Values) -> Tensor:
    """Each module over the pairs that end at the last committed row, request by request."""
    run = _window if draft.case.phase == "decode" else _packed
    return torch.stack(run(draft, values.roles), 1)


def _window(draft: Drafts, roles: Mapping[str, Tensor]) -> list[Tensor]:
    count, window = draft.config.num_draft_tokens, draft.config.num_verify_tokens
    starts, emitted = draft.placed.start.tolist(), roles["num_emitted"].tolist()
    states, ids = [], []
    for request, row in enumerate(draft.placed.row_index.tolist()):
        ring = (draft.buffers["ring_hidden_RKD"], draft.buffers["ring_ids_RK"])
        first = emitted[request] - 1
        pairs = [
            torch.cat([kept[row], new[request]])[first : first + window]
            for kept, new in zip(ring, (roles["aux"], roles["draft_ids"]), strict=True)
        ]
        states.append(pairs[0])
        ids.append(pairs[1])
    for request, row in enumerate(draft.placed.row_index.tolist()):
        draft.buffers["ring_hidden_RKD"][row] = states[request][1:]
        draft.buffers["ring_ids_RK"][row] = ids[request][1:]
    drafts: list[Tensor] = []
    hidden, following = torch.stack(states), torch.stack(ids)
    for step in range(count):
        num_rows = following.shape[1]
        positions = [
            [start + n - num_rows + j for j in range(num_rows)]
            for start, n in zip(starts, emitted, strict=True)
        ]
        rows = [[row] * num_rows for row in draft.state_rows()]
        tokens = place_tokens(draft.config, draft.case.inputs, rows, positions)
        head, recycled = draft.call(
            f"forward.{step}", tokens, owner=f"draft.{step}", input_ids=following,
            position_ids=tokens.position, hidden=hidden,
        )  # fmt: skip
        drafts += draft.call(f"propose.{step}", head_input=head[:, -1])
        following = torch.cat([following, draft.ids(drafts[-1])], 1)
        if draft.ctx.drafter.chain == "target_rows":
            hidden = torch.cat([hidden, recycled[:, -1:]], 1)
        else:
            following, hidden = following[:, 1:], recycled
    return drafts


def _packed(draft: Drafts, roles: Mapping[str, Tensor]) -> list[Tensor]:
    inputs, count = draft.case.inputs, draft.config.num_draft_tokens
    last, owners = inputs["last_R"].tolist(), inputs["owner_T"].tolist()
    drafts: list[Tensor] = []
    hidden, following = roles["aux"], roles["draft_ids"]
    for row, end in zip(draft.placed.row_index.tolist(), last, strict=True):
        for back in range(count):
            inside = int(inputs["position_T"][end]) >= back
            place = max(end - back, 0)
            for name, source in (("ring_hidden_RKD", hidden), ("ring_ids_RK", following)):
                kept = source[0, place] if inside else torch.zeros_like(source[0, 0])
                draft.buffers[name][row, count - 1 - back] = kept
    for step in range(count):
        tokens = draft.placed.tokens
        head, recycled = draft.call(
            f"forward.{step}", tokens, owner=f"draft.{step}", input_ids=following,
            position_ids=tokens.position, hidden=hidden,
        )  # fmt: skip
        drafts += draft.call(
            f"propose.{step}", head_input=torch.stack([head[0, end] for end in last])
        )
        moved_ids, moved_hidden = following.clone(), hidden.clone()
        for place, owner in enumerate(owners):
            is_end, follower = place == last[owner], (place + 1) % len(owners)
            moved_ids[0, place] = (
                max(int(drafts[-1][owner]), 0) if is_end else following[0, follower]
            )
            moved_hidden[0, place] = recycled[0, place] if is_end else hidden[0, follower]
        following = moved_ids
        hidden = moved_hidden if draft.ctx.drafter.chain == "target_rows" else recycled
    return drafts
