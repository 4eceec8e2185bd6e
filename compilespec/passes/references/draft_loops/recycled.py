"""Recycled drafting: each pass reads the hidden state of the pass before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compilespec.passes.references.base import Tokens, Values
from compilespec.passes.references.draft_loops.drafts import Chain, Drafts


def recycled(draft: Drafts, values: Values) -> Tensor:
    """One pass over all rows; then single tokens, each on the hidden state of the pass before."""
    roles, tokens = values.roles, draft.placed.tokens
    (hidden,) = draft.call("combine", aux=roles["aux"])
    head, hidden = draft.call(
        "forward", tokens, input_ids=roles["draft_ids"], position_ids=tokens.position, hidden=hidden
    )
    head, hidden, start = committed_rows(draft, roles, head, hidden)
    if draft.ctx.config.tree is not None:
        return draft.grow(
            "head_input", start, [s + 1 for s in start], _recycled_chain(head, hidden)
        )
    drafts = [*draft.call("propose", head_input=head)]
    for step in range(draft.config.num_draft_tokens - 1):
        tokens = draft.single([position + step for position in start])
        head, hidden = draft.call(
            "forward",
            tokens,
            input_ids=draft.ids(drafts[-1]),
            position_ids=tokens.position,
            hidden=hidden,
        )
        drafts += draft.call("propose", head_input=head[:, 0])
    return torch.stack(drafts, 1)


def _recycled_chain(head_BD: Tensor, hidden_B1D: Tensor) -> Chain:
    def follow(draft: Drafts, request: int, tokens: Sequence[Tokens], ids: Sequence[int]) -> Tensor:
        one = slice(request, request + 1)
        head, hidden = head_BD[one], hidden_B1D[one]
        for place, token in zip(tokens, ids, strict=True):
            fed = draft.ids(head.new_tensor([token], dtype=torch.int32))
            heads, hidden = draft.call(
                "forward", place, input_ids=fed, position_ids=place.position, hidden=hidden
            )
            head = heads[:, 0]
        return head

    return follow


def committed_rows(
    draft: Drafts, roles: Mapping[str, Tensor], head: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """Each request's last committed row, [B, D] and [B, 1, D], and the position after it."""
    start = draft.placed.start.tolist()
    if draft.case.phase == "decode":
        counts = roles["num_emitted"].tolist()
        picked = [(request, count - 1) for request, count in enumerate(counts)]
        start = [begin + count for begin, count in zip(start, counts, strict=True)]
    else:
        picked = [(0, last) for last in draft.case.inputs["last_R"].tolist()]
    heads = torch.stack([head[request, row] for request, row in picked])
    hiddens = torch.stack([hidden[request, row : row + 1] for request, row in picked])
    return heads, hiddens, start
