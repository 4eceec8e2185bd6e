"""Reading DSpark drafters, and making random ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.dflash.layout import check_names
from compilespec.methods.dflash.load import adopt_block, fill_drafter, read_drafter
from compilespec.methods.dflash.random_drafter import fill_randomly, random_config
from compilespec.methods.dspark.config import DSparkConfig, MarkovType
from compilespec.methods.dspark.drafter import DSparkDrafter
from compilespec.methods.dspark.layout import normalise_dspark
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)


def load_drafter(
    draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a module, checked against the target.

    Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, Drafter):
        return adopt_block(draft, target, options)
    source, raw, tensors = read_drafter(draft)
    shapes = check_names(source, tensors)
    config = normalise_dspark(raw, shapes, target.vocab_size, target.num_layers, **options)
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    fill_drafter(drafter, tensors, target, source=source)
    logger.info("%s: %s", source, drafter.describe())
    return drafter


def random_drafter(
    target: TargetInfo,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    markov_type: MarkovType = "vanilla",
    markov_rank: int = 12,
    **fields: Any,
) -> DSparkDrafter:
    """Build a random drafter that fits `target`: `dflash.random_drafter`, with both heads.

    Raises: InvalidOption, DraftMismatch.
    """
    block = random_config(target, draft_vocab_size, {"sample_from_anchor": True, **fields})
    try:
        config = DSparkConfig(
            **vars(block), markov_rank=markov_rank, markov_type=markov_type, has_confidence=True,
            confidence_with_markov=markov_rank > 0,
        )  # fmt: skip
    except TypeError as error:
        raise InvalidOption(f"random_drafter: {error}") from None
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    fill_randomly(drafter, target, seed)
    return drafter
