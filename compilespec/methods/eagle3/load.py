"""From a checkpoint directory or a module to an `Eagle3Drafter` that fits its target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.checkpoint import (
    drop_training_only,
    read_config,
    read_tensors,
)
from compilespec.methods.eagle3.config import Eagle3Config, normalise
from compilespec.methods.eagle3.drafter import Eagle3Drafter
from compilespec.methods.eagle3.layout import canonical_names
from compilespec.methods.parts.adopt import adopt
from compilespec.methods.parts.d2t import check_d2t
from compilespec.methods.parts.weights import fill, place, shared_matrices
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)


def load_drafter(
    draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a module, checked against the target.

    A `Drafter` is adopted as it is; another module must have an EAGLE-3 state_dict and its config.

    Raises:
        CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, Drafter):
        return adopt_head(draft, target, options)
    source, raw, tensors = read_head(draft)
    drafter = _build(source, raw, tensors, target, options)
    logger.info("%s: %s", source, drafter.describe())
    return drafter


def adopt_head(drafter: Drafter, target: TargetInfo, options: Mapping[str, Any]) -> Drafter:
    """A drafter as it is, checked.  Raises: DraftMismatch, InvalidOption."""
    adopt(drafter, target, options)
    if isinstance(drafter, Eagle3Drafter):
        check_sizes(drafter.config, target)
    return drafter


def read_head(draft: str | Path | nn.Module) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Where a head comes from, its config and its tensors, by the drafter module's names.

    Raises: CheckpointError, DraftMismatch, InvalidOption.
    """
    if isinstance(draft, nn.Module):
        return f"draft module {type(draft).__name__}", *_take_apart(draft)
    if isinstance(draft, str | Path):
        return str(draft), read_config(draft), canonical_names(read_tensors(draft))
    raise InvalidOption(f"draft: expected a directory or an nn.Module, got {type(draft).__name__}")


def check_sizes(config: Eagle3Config, target: TargetInfo) -> None:
    """Compare the sizes that drafter and target share.

    Raises:
        DraftMismatch: hidden size or vocabulary differ.
    """
    if config.target_hidden_size != target.hidden_size:
        raise DraftMismatch(
            f"the draft expects target hidden states of width {config.target_hidden_size}, the "
            "target's are "
            f"{target.hidden_size}: this is the draft of another target"
        )
    if config.vocab_size != target.vocab_size:
        raise DraftMismatch(
            f"the draft's target vocabulary is {config.vocab_size}, the target's is "
            f"{target.vocab_size}: this is the draft of another target, or one of the two was "
            "padded"
        )


def _take_apart(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a transformers-like module."""
    config: Any = getattr(module, "config", None)
    raw = config.to_dict() if hasattr(config, "to_dict") else config
    tensors = canonical_names(drop_training_only(module.state_dict()))
    if not isinstance(raw, Mapping) or "layers.0.hidden_norm.weight" not in tensors:
        raise DraftMismatch(
            f"draft module {type(module).__name__}: expected a compilespec Drafter, or a module "
            "with .config and an EAGLE-3 state_dict (fc, midlayer.* or layers.0.*, norm, lm_head)"
        )
    return dict(raw), tensors


def _build(
    source: str,
    raw: Mapping[str, Any],
    tensors: dict[str, Tensor],
    target: TargetInfo,
    options: Mapping[str, Any],
) -> Eagle3Drafter:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = normalise(raw, shapes, target.num_layers, **options)
    with torch.device("meta"):
        drafter = Eagle3Drafter(config)
    fill_head(drafter, tensors, target, source=source)
    return drafter


def fill_head(
    drafter: Eagle3Drafter, tensors: dict[str, Tensor], target: TargetInfo, *, source: str
) -> None:
    """Give a drafter on the meta device the tensors of a checkpoint, by its own names, and share
    the target's.

    Raises: CheckpointError, DraftMismatch.
    """
    config = drafter.config
    check_sizes(config, target)
    t2d = tensors.pop("t2d", None)
    if "d2t" in tensors:
        check_d2t(tensors["d2t"], t2d, config.draft_vocab_size, config.vocab_size)
    place(tensors, target)
    shared = shared_matrices(config, tensors, target)
    fill(drafter, tensors, shared, source=source, device=target.device)
