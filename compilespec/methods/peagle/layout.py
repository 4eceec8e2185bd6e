"""The layout of a P-EAGLE checkpoint: an EAGLE-3 head's, and what the masked rows take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compilespec.errors import CheckpointError
from compilespec.methods.eagle3.config import normalise
from compilespec.methods.mask_token import read_mask_token
from compilespec.methods.peagle.drafter import PEagleConfig

MASK_KEYS = ("mask_token_id", "pard_token")  # of speculators, and of vLLM's checkpoints


def normalise_peagle(
    source: str,
    raw: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    num_target_layers: int,
    **options: Any,
) -> PEagleConfig:
    """Read config.json and the tensors' names and shapes into one `PEagleConfig`.

    Args: those of `eagle3.config.normalise`.
    Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if "mask_hidden" not in shapes:
        raise CheckpointError(
            f"{source}: not a P-EAGLE checkpoint: there is no tensor mask_hidden; an EAGLE-3 head "
            "is loaded with spec='eagle3'"
        )
    of_head = {name: shape for name, shape in shapes.items() if name != "mask_hidden"}
    head = normalise(raw, of_head, num_target_layers, kind="peagle", **options)
    mask_token_id = read_mask_token((raw,), MASK_KEYS, head.vocab_size)
    return PEagleConfig(**vars(head), mask_token_id=mask_token_id)
