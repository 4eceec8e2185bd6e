"""Block drafting: the context of committed rows is written, a block is run and forgotten."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.references.base import Values
from compilespec.passes.references.draft_loops.drafts import Drafts
from compilespec.passes.references.placement import place_tokens
from compilespec.passes.references.trees import unwritten


def block(draft: Drafts, values: Values) -> Tensor:
    """One pass over the newest token and masks."""
    write_context(draft, values)
    newest, target = draft.placed.start.tolist(), values.roles["target"]
    token = target[:, 0]
    if draft.case.phase == "decode":
        counts = values.roles["num_emitted"].tolist()
        newest = [start + n for start, n in zip(newest, counts, strict=True)]
        token = torch.stack([target[b, n - 1] for b, n in enumerate(counts)])
    position = torch.tensor(newest, dtype=torch.int32, device=token.device)
    ids, positions, *sights = draft.call("block", token=token, position=position)
    rows = [[row] * ids.shape[1] for row in draft.state_rows()]
    before = [[max(place - 1, 0)] * ids.shape[1] for place in newest]
    places = unwritten(place_tokens(draft.config, draft.case.inputs, rows, before))
    pairs = [(path, first) for first, path in zip(sights[::2], sights[1::2], strict=True)]
    (head,) = draft.call("forward", places, sights=pairs, input_ids=ids, position_ids=positions)
    count = draft.ctx.config.num_row_tokens - 1
    if "follow" in draft.ctx.draft:
        return _in_turn(draft, head, token, count)
    for number in range(count):
        draft.judge(head[:, number], token)
    return draft.propose_all(head[:, :count])


def _in_turn(draft: Drafts, head: Tensor, token: Tensor, count: int) -> Tensor:
    """Each draft after the one before it."""
    head, state = draft.call("state", head_input=head, token=token)
    rows = head[:, :count].flatten(0, 1)
    (base,) = draft.call("base", head_input=rows)
    drafts: list[Tensor] = []
    for number in range(count):
        features, state = draft.call(
            "follow", head_input=rows[number::count], token=token, state=state
        )
        draft.judge(rows[number::count], token)
        (token,) = draft.call("propose", base=base[number::count], features=features)
        drafts.append(token)
    return torch.stack(drafts, 1)


def write_context(draft: Drafts, values: Values) -> None:
    """The keys and values of the rows that stay."""
    tokens = draft.placed.tokens
    aux = [values.roles[f"aux.{index}"] for index in range(len(draft.ctx.drafter.aux_layers))]
    parts = draft.call("context", aux=torch.cat(aux, -1), position_ids=tokens.position)
    counts = [tokens.slot.shape[1]]
    if draft.case.phase == "decode":
        counts = values.roles["num_emitted"].tolist()
    for index, part in enumerate(parts):
        half = "value" if index % 2 else "key"
        cells = draft.buffers[f"cache.draft.{index // 2}.{half}"].flatten(0, 1)
        for b, count in enumerate(counts):
            for j, slot in enumerate(tokens.slot[b, :count].tolist()):
                if slot >= 0:
                    cells[slot] = part[b, :, j]
