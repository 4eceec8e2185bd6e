"""Training of drafters, and what trainers of a target ask of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compilespec.training.scoring import log_probs
    from compilespec.training.trl_rollouts import TrlRollouts

__all__ = ["TrlRollouts", "log_probs"]


def __getattr__(name: str) -> Any:
    """Import torch only for what needs it: `compilespec train --help` stays quick."""
    if name == "log_probs":
        from compilespec.training import scoring

        return scoring.log_probs
    if name == "TrlRollouts":
        from compilespec.training import trl_rollouts

        return trl_rollouts.TrlRollouts
    raise AttributeError(f"module 'compilespec.training' has no attribute {name!r}")
