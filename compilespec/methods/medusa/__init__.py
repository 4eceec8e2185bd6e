"""Medusa: heads over the target's last hidden state, each of which drafts one token further on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.medusa.drafter import MedusaDrafter, MedusaHead
from compilespec.methods.medusa.load import load_drafter, random_heads
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "MedusaDrafter", "MedusaHead", "random_heads"]


class MedusaMethod:
    """No own cache: all drafts are made of one hidden state."""

    capabilities = Capabilities(
        name="medusa",
        brings="heads without a cache, each one draft",
        kind="heads",
        needs_draft_weights=True,
        reads_hidden_states=True,
        options=(),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the heads from a checkpoint directory of any layout, or adopt a `Drafter`.

        Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target)


METHOD = MedusaMethod()
