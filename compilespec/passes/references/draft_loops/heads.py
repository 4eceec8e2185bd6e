"""Drafting by heads: each on the hidden state of the last committed row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilespec.passes.references.base import Tokens, Values
from compilespec.passes.references.draft_loops.direct import newest_hidden
from compilespec.passes.references.draft_loops.drafts import Chain, Drafts


def heads(draft: Drafts, values: Values) -> Tensor:
    """One head after the other."""
    hidden = newest_hidden(draft, values)
    if draft.ctx.config.tree is not None:
        newest = draft.newest()
        return draft.grow("head_input", newest, [n + 1 for n in newest], _same(hidden))
    drafts: list[Tensor] = []
    for number in range(draft.config.num_draft_tokens):
        drafts += draft.call(f"propose.{number}", head_input=hidden)
    return torch.stack(drafts, 1)


def _same(hidden_BD: Tensor) -> Chain:
    """Heads know no draft: the hidden state is the same after every path."""

    def follow(draft: Drafts, request: int, tokens: Sequence[Tokens], ids: Sequence[int]) -> Tensor:
        return hidden_BD[request : request + 1]

    return follow
