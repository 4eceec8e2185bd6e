"""A look-up beside a model's drafts: each request takes those that are surer."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.draft_loops.direct import proposed
from compilespec.passes.evidence import level_of_matches
from compilespec.passes.graph import emit, find_role, has_role, output_node

UNKNOWN = 12  # sixteenths: a draft of a model that does not say how probable it is


def combine(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The role `drafts`, and its `level`, become those of the call "draft" where they are surer.

    The model has run as ever, so that its caches are what they would be.  Torch IR.
    """
    found, matched = proposed(gm, ctx)
    modelled = find_role(gm, "drafts")
    levels = [find_role(gm, "level")] if has_role(gm, "level") else []
    drafts, level = emit(
        gm, surer, modelled, found, matched, *levels, before=output_node(gm)
    )  # fmt: skip
    for role, old, new in (("drafts", [modelled], drafts), ("level", levels, level)):
        for node in old:
            del node.meta["role"]
        new.meta["role"] = role


def surer(modelled_BK: Any, found_BK: Any, matched_B: Any, level_B: Any = None) -> tuple[Any, Any]:
    """Drafts and their level.  After a match of m tokens the next one is right with a chance of
    m / (m + 1), about; the drafts of a model with the mean probability that its level says.  Where
    the model drafted nothing, what was found is taken.
    """
    chance = UNKNOWN if level_B is None else torch.where(level_B > 0, level_B * 2 - 1, UNKNOWN)
    is_surer_B = (matched_B * 16 > (matched_B + 1) * chance) | (modelled_BK[:, 0] < 0)
    takes_B = is_surer_B & (found_BK[:, 0] >= 0)
    own_B = torch.zeros_like(matched_B) if level_B is None else level_B
    level = torch.where(takes_B, level_of_matches(matched_B), own_B).to(torch.int32)
    return torch.where(takes_B.unsqueeze(1), found_BK, modelled_BK), level
