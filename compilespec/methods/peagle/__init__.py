"""P-EAGLE: an EAGLE-3 head whose later rows hold a mask, so that one pass gives all K drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.peagle.drafter import PEagleConfig, PEagleDrafter
from compilespec.methods.peagle.load import load_drafter, random_head
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "PEagleConfig", "PEagleDrafter", "random_head"]


class PEagleMethod:
    """Parallel drafter with its own KV cache; greedy and sampled output are those of the target."""

    capabilities = Capabilities(
        name="peagle",
        brings="all drafts of one pass: cheaper for large K than eagle3",
        kind="parallel",
        needs_draft_weights=True,
        reads_hidden_states=True,
        own_kv_cache=True,
        options=("aux_ids_are", "aux_layers", "norm_before_residual"),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the drafter from a checkpoint directory of any layout, or adopt a module.

        Options: those of `eagle3`.

        Raises:
            CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options)


METHOD = PEagleMethod()
