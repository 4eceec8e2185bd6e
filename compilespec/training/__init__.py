"""Training of drafters, and what trainers of a target ask of an engine."""

from compilespec.training.scoring import log_probs

__all__ = ["log_probs"]
