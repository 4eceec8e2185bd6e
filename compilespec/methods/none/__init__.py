"""Plain decoding: one token per step, no drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.tracing.target_info import TargetInfo


class NoneMethod:
    """No drafter: the decode graph is the target and the sampling of one token (S = 1)."""

    capabilities = Capabilities(
        name="none",
        brings="plain decoding, one token a step",
        kind="none",
        aliases=("NONE",),
        options=(),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter | None:
        """No drafter."""
        return None


METHOD = NoneMethod()
