"""Drafting by heads: each on the hidden state of the last committed row."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.references.base import Values
from compilespec.passes.references.draft_loops.direct import newest_hidden
from compilespec.passes.references.draft_loops.drafts import Drafts


def heads(draft: Drafts, values: Values) -> Tensor:
    """One head after the other."""
    hidden = newest_hidden(draft, values)
    drafts: list[Tensor] = []
    for number in range(draft.config.num_draft_tokens):
        drafts += draft.call(f"propose.{number}", head_input=hidden)
    return torch.stack(drafts, 1)
