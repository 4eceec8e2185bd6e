"""Reading P-EAGLE heads, and making random ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.methods.base import Drafter
from compilespec.methods.eagle3.load import adopt_head, fill_head, read_head
from compilespec.methods.eagle3.random_head import fill_randomly, random_config
from compilespec.methods.peagle.drafter import PEagleConfig, PEagleDrafter
from compilespec.methods.peagle.layout import normalise_peagle
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)


def load_drafter(
    draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a module, checked against the target.

    Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, Drafter):
        return adopt_head(draft, target, options)
    source, raw, tensors = read_head(draft)
    drafter = _build(source, raw, tensors, target, options)
    logger.info("%s: %s", source, drafter.describe())
    return drafter


def _build(
    source: str,
    raw: Mapping[str, Any],
    tensors: dict[str, Tensor],
    target: TargetInfo,
    options: Mapping[str, Any],
) -> PEagleDrafter:
    shapes = {name: part.shape for name, part in tensors.items()}
    config = normalise_peagle(source, raw, shapes, target.num_layers, **options)
    with torch.device("meta"):
        drafter = PEagleDrafter(config)
    fill_head(drafter, tensors, target, source=source)
    drafter.settle()
    return drafter


def random_head(
    target: TargetInfo,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    body: str = "llama",
    mask_token_id: int = 0,
    **fields: Any,
) -> PEagleDrafter:
    """Build a random head that fits `target`: `eagle3.random_head`, with a mask.

    Raises: InvalidOption, DraftMismatch.
    """
    rows = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    head = random_config(target, rows, body, fields)
    with torch.device("meta"):
        drafter = PEagleDrafter(PEagleConfig(**vars(head), mask_token_id=mask_token_id))
    fill_randomly(drafter, target, seed)
    drafter.settle()
    return drafter
