"""`spec="auto"`: the method and the K that a short measurement favours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import NotSupported
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Capabilities
from compilespec.tracing.target_info import TargetInfo


class AutoMethod:
    """A placeholder for the method that `compile()` picks (`compilespec/pipeline/auto.py`)."""

    capabilities = Capabilities(
        name="auto",
        brings="a short trial of what lies beside the model; takes the fastest",
        kind="none",
        chooses=True,
        aliases=("AUTO",),
        options=(),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter | None:
        """Raises: NotSupported, always: there is nothing to load before the choice is made."""
        raise NotSupported("spec='auto' is resolved by compile(); name a method here")


METHOD = AutoMethod()
