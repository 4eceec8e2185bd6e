"""EAGLE-1 and EAGLE-2 (the same weights): one layer over fc([embedding ; last hidden state])."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.eagle.config import EagleConfig
from compilespec.methods.eagle.drafter import EagleDrafter
from compilespec.methods.eagle.load import load_drafter, random_head, save_head
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "EagleConfig", "EagleDrafter", "random_head", "save_head"]


class EagleMethod:
    """Recycled drafter with its own KV cache, drafting a chain; it reads the hidden state that
    enters the target's head, and proposes with that head.
    """

    capabilities = Capabilities(
        name="eagle",
        brings="the older head, for models that have no EAGLE-3 one",
        kind="recycled",
        needs_draft_weights=True,
        reads_hidden_states=True,
        own_kv_cache=True,
        options=(),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the drafter from a checkpoint directory in the authors' layout, or adopt a module.
        There are no options.

        Raises:
            CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options)


METHOD = EagleMethod()
