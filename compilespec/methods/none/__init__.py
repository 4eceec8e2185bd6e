"""Plain decoding: one token per step, no drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Capabilities, Drafter, TargetInfo


class NoneMethod:
    """No drafter: the decode graph is the target and the sampling of one token (S = 1)."""

    capabilities = Capabilities(name="none", kind="none", aliases=("NONE",))

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> Drafter:
        """Always an error: callers ask `capabilities.needs_draft_weights` first.

        Raises:
            InvalidOption: a draft or an option was given, or a drafter was asked for.
        """
        if options:
            raise InvalidOption(f"spec='none' takes no options, came {', '.join(sorted(options))}")
        raise InvalidOption("spec='none' has no drafter; leave out draft= or choose another method")


METHOD = NoneMethod()
