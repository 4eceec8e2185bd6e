"""Adopts a drafter that the caller made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.base import Drafter
from compilespec.tracing.target_info import TargetInfo


def adopt(drafter: Drafter, target: TargetInfo, options: Mapping[str, Any]) -> Drafter:
    """A drafter as it is, checked.  Raises: DraftMismatch, InvalidOption."""
    if options:
        raise InvalidOption(
            f"{', '.join(sorted(options))}: only for checkpoints, got a Drafter module"
        )
    check_drafter(drafter, target)
    return drafter


def check_drafter(drafter: Drafter, target: TargetInfo) -> None:
    """Check K and the aux layers.  Raises: DraftMismatch."""
    name = type(drafter).__name__
    k = getattr(drafter, "num_draft_tokens", None)
    layers = getattr(drafter, "aux_layers", None)
    if not isinstance(k, int) or k < 1:
        raise DraftMismatch(f"{name}.num_draft_tokens: expected an integer of 1 or more, got {k!r}")
    if not isinstance(layers, tuple) or not all(isinstance(i, int) for i in layers) or not layers:
        raise DraftMismatch(f"{name}.aux_layers: expected a tuple of hs indices, got {layers!r}")
    if min(layers) < 0 or max(layers) > target.num_layers:
        raise DraftMismatch(
            f"{name}.aux_layers: hs{list(layers)} lie outside the target, which has hs[0] to "
            f"hs[{target.num_layers}]"
        )
