"""Drafts from the host: the step makes room, and the host writes them between two calls."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.program import PAD


def callback(step: Splice) -> int:
    """Make the role `drafts` ([B, K], int32), all PAD, without a drafter pass.  Torch IR."""
    step.roles.drafts = step.call(no_drafts, step.roles.row_index)
    return 0


def no_drafts(index_B: Tensor, *, num_draft_tokens: int) -> Tensor:
    """PAD, [B, K]."""
    wide_BK = index_B.unsqueeze(1).expand(-1, num_draft_tokens)
    return torch.full_like(wide_BK, PAD, dtype=torch.int32)
