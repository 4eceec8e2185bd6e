"""Lets tokens of a prompt see later ones: those of an image each other, in Gemma 3 and 4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.passes.splice.builder import Splice

AHEAD = "ahead_T"  # how many later tokens each token of a prefill call sees


@dataclass(frozen=True, kw_only=True)
class Sights:
    """What attention is given where tokens see later ones, int32 [1, T]."""

    position: Tensor  # each token's own
    last: Tensor  # the last one that it sees
    path: Tensor  # [1, T, 1], empty: all keys are in the caches
    in_windows: bool = False  # layers without a window are causal

    def are_of(self, window: int) -> bool:
        """True where tokens see later ones in a layer."""
        return window > 0 or not self.in_windows

    def first(self, window: int) -> Tensor:
        """The first position that each token sees: a window ends at the token itself."""
        return (self.position - (window - 1)).clamp(min=0)


def read_sights(step: Splice, position: Tensor) -> Sights | None:
    """None where attention is causal: in a decode step, and of most models."""
    if not step.config.features.sees_ahead or step.is_decode:
        return None
    last, path = look_ahead(position, step.batch(AHEAD))
    in_windows = step.config.features.ahead_in_windows
    return Sights(position=position, last=last, path=path, in_windows=in_windows)


def look_ahead(position_1T: Tensor, ahead_T: Tensor) -> tuple[Tensor, Tensor]:
    """The last position that each token sees, and paths of no tokens."""
    last_1T = position_1T + ahead_T.unsqueeze(0)
    return last_1T, torch.full_like(last_1T, -1).unsqueeze(2)
