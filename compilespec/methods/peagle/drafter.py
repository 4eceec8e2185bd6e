"""The P-EAGLE drafter module: an EAGLE-3 head and what its masked rows take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compilespec.methods.eagle3.config import Eagle3Config
from compilespec.methods.eagle3.drafter import Eagle3Drafter
from compilespec.methods.parallel import ParallelDrafter


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """One P-EAGLE head, in any checkpoint format."""

    mask_token_id: int
    """The token whose embedding stands for those that are not known yet."""

    def describe(self) -> str:
        """The resolved spec on one line."""
        head = super().describe().removeprefix("eagle3 ")
        return f"peagle {head}, mask token {self.mask_token_id}"


class PEagleDrafter(ParallelDrafter, Eagle3Drafter):
    """An EAGLE-3 head that drafts in parallel.

    The row of the last committed position proposes draft 1 as an EAGLE-3 head's does.  Each of the
    rows after it has the next position, the embedding of the mask token, and for a hidden state
    what `combine` makes of `mask_hidden`; attention is causal as ever.

    Source: Hui et al. 2026 (P-EAGLE); speculators 0.9's `PEagleDraftModel`, without its sampling
    of rows in training.
    """

    config: PEagleConfig
    mask_row: Tensor

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        width = len(config.aux_layers) * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("mask_row", torch.empty(config.hidden_size), persistent=False)

    @torch.no_grad()
    def settle(self) -> None:
        """Combine `mask_hidden` once for all; call it again after a change of weights."""
        self.mask_row = self.combine(self.mask_hidden)[0, 0]

    def mask(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and hidden states of masked rows at `position_ids`, [B, M]: int32, and [B, M, D]."""
        ids_BM = torch.full_like(position_ids, self.config.mask_token_id)
        return ids_BM, self.mask_row.expand(*position_ids.shape, -1)
