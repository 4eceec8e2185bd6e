"""MTP: one multi-token-prediction module per draft step, each over its own window of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.mtp.config import MtpConfig
from compilespec.methods.mtp.drafter import MtpDrafter
from compilespec.methods.mtp.load import load_drafter
from compilespec.methods.mtp.module import MtpStep
from compilespec.methods.mtp.random_modules import random_modules
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD", "MtpConfig", "MtpDrafter", "MtpStep", "random_modules"]


class MtpMethod:
    """Windowed drafting with the checkpoint's modules: a window of K+1 rows per step."""

    capabilities = Capabilities(
        name="mtp",
        brings="the prediction modules that a model was trained with, one a draft",
        kind="windowed",
        needs_draft_weights=True,
        reads_hidden_states=True,
        own_kv_cache=True,
        inside_target=True,
        aliases=("MTP",),
        options=("pos0_mask", "chain"),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Load the modules of a checkpoint directory of any layout, or adopt a `Drafter`.

        Options: `chain` ("module_rows": each module reads the one before; "target_rows": all read
        the target's rows), `pos0_mask` (no embedding in the row of position 0).  If K exceeds the
        number of modules, they are used in turn, each use with its own cache.

        Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options, recycled=False)


METHOD = MtpMethod()
