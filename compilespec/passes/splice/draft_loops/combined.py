"""A look-up beside a model's drafts: each request takes those that are surer."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.draft_loops.direct import proposed
from compilespec.passes.splice.evidence import confidence_of_matches

UNKNOWN = 12  # sixteenths: a draft of a model that does not say how probable it is


def combine(step: Splice) -> None:
    """The roles `drafts` and `confidence` become those of the call "draft" where they are surer.

    The model has run as ever, so that its caches are what they would be.  Torch IR.
    """
    roles = step.roles
    found, matched = proposed(step)
    roles.drafts, roles.confidence = surer(roles.drafts, found, matched, step.find("confidence"))


def surer(
    modelled_BK: Tensor, found_BK: Tensor, matched_B: Tensor, confidence_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Drafts and their confidence.  After a match of m tokens the next one is right with a chance
    of m / (m + 1), about; the drafts of a model with the mean probability that it says.  Where
    the model drafted nothing, what was found is taken.
    """
    chance: Tensor | int = UNKNOWN
    if confidence_B is not None:
        chance = torch.where(confidence_B > 0, confidence_B * 2 - 1, UNKNOWN)
    is_surer_B = (matched_B * 16 > (matched_B + 1) * chance) | (modelled_BK[:, 0] < 0)
    takes_B = is_surer_B & (found_BK[:, 0] >= 0)
    own_B = torch.zeros_like(matched_B) if confidence_B is None else confidence_B
    confidence = torch.where(takes_B, confidence_of_matches(matched_B), own_B).to(torch.int32)
    return torch.where(takes_B.unsqueeze(1), found_BK, modelled_BK), confidence
