"""DSpark: DFlash, whose drafts know the one before through a Markov head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.dspark.config import DSparkConfig
from compilespec.methods.dspark.drafter import DSparkDrafter
from compilespec.methods.dspark.load import load_drafter, random_drafter
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "DSparkConfig", "DSparkDrafter", "random_drafter"]


class DSparkMethod:
    """Block drafter with its own KV cache; greedy and sampled output are those of the target."""

    capabilities = Capabilities(
        name="dspark",
        brings="dflash whose drafts know the ones before them",
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

        Options: those of `dflash`.

        Raises:
            CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options)


METHOD = DSparkMethod()
