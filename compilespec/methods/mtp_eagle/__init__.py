"""MTP, EAGLE style: the first MTP module of a checkpoint drafts every token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.mtp.load import load_drafter
from compilespec.tracing.target_info import TargetInfo

__all__ = ["METHOD"]


class MtpEagleMethod:
    """One module reused K times with one cache; greedy and sampled output are the target's.

    Source: requirement M11; vLLM's default for MTP, TensorRT-LLM's MTP-Eagle.
    """

    capabilities = Capabilities(
        name="mtp_eagle",
        brings="its first prediction module, used again for each draft",
        kind="recycled",
        needs_draft_weights=True,
        inside_target=True,
        folders=("mtp",),
        reads_hidden_states=True,
        own_kv_cache=True,
        aliases=("MTP_EAGLE", "MTP_EAGLE_ONE_MODEL"),
        options=("pos0_mask",),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Build the drafter from a checkpoint directory of any layout, or adopt a module.

        Options: `pos0_mask` (bool): the embedding is zero in the row of position 0, as vLLM does.

        Raises:
            CheckpointError, DraftMismatch, InvalidOption, NotSupported.
        """
        assert draft is not None, "the caller looks for a draft first"
        return load_drafter(draft, target, options, recycled=True)


METHOD = MtpEagleMethod()
