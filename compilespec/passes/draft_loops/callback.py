"""Drafts from the host: the step makes room, and the host writes them between two calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.graph import emit, find_role, output_node
from compilespec.program import PAD


def callback(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Make the role `drafts` ([B, K], int32), all PAD, without a drafter pass.  Torch IR."""
    drafts = emit(
        gm, no_drafts, find_role(gm, "row_index"), before=output_node(gm),
        num_draft_tokens=ctx.config.num_draft_tokens,
    )  # fmt: skip
    drafts.meta["role"] = "drafts"
    return 0


def no_drafts(index_B: Any, *, num_draft_tokens: int) -> Any:
    """PAD, [B, K]."""
    wide_BK = index_B.unsqueeze(1).expand(-1, num_draft_tokens)
    return torch.full_like(wide_BK, PAD, dtype=torch.int32)
