"""DFlash: one pass over a block of masked rows, on keys and values made of the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.dflash.config import DFlashConfig
from compilespec.methods.dflash.drafter import DFlashDrafter
from compilespec.methods.dflash.load import load_drafter
from compilespec.methods.dflash.random_drafter import random_drafter
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "DFlashConfig", "DFlashDrafter", "random_drafter"]


class DFlashMethod:
    """Block drafter with its own KV cache; greedy and sampled output are those of the target."""

    capabilities = Capabilities(
        name="dflash",
        brings="a whole block of drafts of one pass, for long K",
        kind="block",
        needs_draft_weights=True,
        reads_hidden_states=True,
        own_kv_cache=True,
        options=("aux_layers",),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the drafter from a checkpoint directory of any layout, or adopt a module.

        Options: `aux_layers` (hs indices), which replaces what the checkpoint says.

        Raises:
            CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options)


METHOD = DFlashMethod()
