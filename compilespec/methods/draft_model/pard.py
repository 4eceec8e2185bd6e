"""Draft models that were taught to draft all tokens in one pass (PARD, PARD-2)."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from compilespec.errors import InvalidOption
from compilespec.methods.mask_token import read_mask_token

logger = logging.getLogger(__name__)

KEY = "pard_token"


def pard_token(model: nn.Module, parallel: Any) -> int | None:
    """The mask token of a draft model that drafts in one pass; None for one that does not.

    Args:
        parallel: the option; None: as the model's own config says.
    Raises: InvalidOption; CheckpointError where the token is missing or none of the model's.
    Source: AMD-AGI/PARD (An et al. 2025, 2026).  A PARD-2 model drafts in its target-independent
        mode, which reads no hidden states.
    """
    if parallel not in (None, True, False):
        raise InvalidOption(f"parallel must be true, false or None, got {parallel!r}")
    config = getattr(model, "config", None)
    own = {KEY: getattr(config, KEY, None)}
    if parallel is False or (parallel is None and own[KEY] is None):
        return None
    if is_pard2(config):
        logger.warning(
            "a PARD-2 draft model drafts in its target-independent mode: its target_proj, which "
            "reads the target's hidden states, is not used"
        )
    rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return read_mask_token((own,), (KEY,), rows)


def is_pard2(config: Any) -> bool:
    """True where a config is that of a PARD-2 draft model."""
    return bool(getattr(config, "pard2", False)) or getattr(config, "spd_type", None) == "pard2"
