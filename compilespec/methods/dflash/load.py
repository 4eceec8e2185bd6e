"""From a checkpoint directory or a module to a `DFlashDrafter` that fits its target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.checkpoint import drop_training_only, read_config, read_tensors
from compilespec.methods.dflash.config import DFlashConfig, normalise
from compilespec.methods.dflash.drafter import DFlashDrafter
from compilespec.methods.dflash.layout import canonical_names, check_names
from compilespec.methods.parts.adopt import adopt
from compilespec.methods.parts.d2t import check_d2t
from compilespec.methods.parts.weights import fill, place, shared_matrices
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)


def load_drafter(
    draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a module, checked against the target.

    A `Drafter` is adopted as it is; another module must have a DFlash state_dict and its config.

    Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, Drafter):
        return adopt_block(draft, target, options)
    source, raw, tensors = read_drafter(draft)
    shapes = check_names(source, tensors)
    config = normalise(raw, shapes, target.vocab_size, target.num_layers, **options)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    fill_drafter(drafter, tensors, target, source=source)
    logger.info("%s: %s", source, drafter.describe())
    return drafter


def adopt_block(drafter: Drafter, target: TargetInfo, options: Mapping[str, Any]) -> Drafter:
    """A drafter as it is, checked.  Raises: DraftMismatch, InvalidOption."""
    if isinstance(drafter, DFlashDrafter) and not options:
        check_sizes(drafter.config, target)
        return drafter
    return adopt(drafter, target, options)


def read_drafter(draft: str | Path | nn.Module) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Where a drafter comes from, its config and its tensors, by the drafter module's names.

    Raises: CheckpointError, DraftMismatch, InvalidOption.
    """
    if isinstance(draft, str | Path):
        return str(draft), read_config(draft), canonical_names(read_tensors(draft))
    if not isinstance(draft, nn.Module):
        raise InvalidOption(
            f"draft: expected a directory or an nn.Module, got {type(draft).__name__}"
        )
    config: Any = getattr(draft, "config", None)
    raw = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(raw, Mapping):
        raise DraftMismatch(
            f"draft module {type(draft).__name__}: expected a compilespec Drafter, or a module "
            "with .config and a DFlash state_dict (fc, hidden_norm, layers.*, norm)"
        )
    tensors = canonical_names(drop_training_only(draft.state_dict()))
    return f"draft module {type(draft).__name__}", dict(raw), tensors


def fill_drafter(
    drafter: DFlashDrafter, tensors: dict[str, Tensor], target: TargetInfo, *, source: str
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
    fill(
        drafter, tensors, shared_matrices(config, tensors, target), source=source,
        device=target.device,
    )  # fmt: skip


def check_sizes(config: DFlashConfig, target: TargetInfo) -> None:
    """Compare the sizes that drafter and target share.  Raises: DraftMismatch."""
    if config.target_hidden_size != target.hidden_size:
        raise DraftMismatch(
            f"fc takes {len(config.aux_layers)} target hidden states of width "
            f"{config.target_hidden_size}, the target's are {target.hidden_size}: this is the "
            "draft of another target, or of another number of aux layers"
        )
    if config.vocab_size != target.vocab_size:
        raise DraftMismatch(
            f"the draft's target vocabulary is {config.vocab_size}, the target's is "
            f"{target.vocab_size}: this is the draft of another target, or one of the two was "
            "padded"
        )
    if max(config.aux_layers) > target.num_layers:
        raise DraftMismatch(
            f"aux hidden states hs{list(config.aux_layers)} lie outside the target, which has "
            f"hs[0] to hs[{target.num_layers}]: this is the draft of another target"
        )
    own = config.own_embedding and config.own_lm_head
    if not own and config.hidden_size != target.hidden_size:
        raise DraftMismatch(
            f"the draft is {config.hidden_size} wide, and takes the target's embedding or head, "
            f"which are {target.hidden_size} wide: this is the draft of another target"
        )
