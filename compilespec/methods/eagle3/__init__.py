"""EAGLE-3: one layer over [embedding, hidden], fed with three inner hidden states of the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.eagle3.config import Eagle3Config
from compilespec.methods.eagle3.drafter import Eagle3Drafter
from compilespec.methods.eagle3.load import load_drafter
from compilespec.methods.eagle3.random_head import random_head
from compilespec.methods.eagle3.save import save_head
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "Eagle3Config", "Eagle3Drafter", "random_head", "save_head"]


class Eagle3Method:
    """Recycled drafter with its own KV cache; greedy and sampled output are those of the target."""

    capabilities = Capabilities(
        name="eagle3",
        brings="a head of one layer; many are published, `compilespec train` makes one",
        kind="recycled",
        needs_draft_weights=True,
        reads_hidden_states=True,
        own_kv_cache=True,
        aliases=("EAGLE3", "EAGLE3_ONE_MODEL"),
        options=("aux_ids_are", "aux_layers", "norm_before_residual"),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the drafter from a checkpoint directory of any layout, or adopt a module.

        Options: `aux_ids_are` ("hs" | "output"), `aux_layers` (hs indices), `norm_before_residual`
        (bool); each replaces what the checkpoint says.

        Raises:
            CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options)


METHOD = Eagle3Method()
