"""Reading Medusa heads, and making random ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, NotSupported
from compilespec.methods.base import Drafter
from compilespec.methods.checkpoint import load_strict, read_config
from compilespec.methods.medusa.drafter import MedusaDrafter
from compilespec.methods.medusa.layout import read_heads
from compilespec.methods.parts.random import random_tensor
from compilespec.methods.parts.weights import place
from compilespec.ops.device import traits_of
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)


def load_drafter(draft: str | Path | nn.Module, target: TargetInfo) -> Drafter:
    """Build the heads from a checkpoint, or adopt a drafter, checked against the target.

    Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, Drafter):
        if isinstance(draft, MedusaDrafter):
            check_sizes(draft, target)
        return draft
    if not isinstance(draft, str | Path):
        raise InvalidOption(
            f"draft: expected a directory or a MedusaDrafter, got {type(draft).__name__}"
        )
    drafter = _build(str(draft), read_config(draft), read_heads(draft), target)
    logger.info("%s: %s", draft, drafter.describe())
    return drafter


def check_sizes(drafter: MedusaDrafter, target: TargetInfo) -> None:
    """Compare the sizes that heads and target share.  Raises: DraftMismatch."""
    if drafter.hidden_size != target.hidden_size:
        raise DraftMismatch(
            f"the heads expect hidden states of width {drafter.hidden_size}, the target's are "
            f"{target.hidden_size}: these are the heads of another target"
        )
    ids = drafter.heads[0].draft_ids
    if ids is None and drafter.num_rows != target.vocab_size:
        raise DraftMismatch(
            f"the heads' vocabulary is {drafter.num_rows}, the target's is {target.vocab_size}: "
            "these are the heads of another target, or one of the two was padded"
        )


def _build(
    source: str, raw: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetInfo
) -> MedusaDrafter:
    if float(raw.get("logit_scale") or 1) != 1:
        raise NotSupported(f"{source}: heads with logit_scale={raw['logit_scale']} are not built")
    token_map = tensors.pop("token_map", None)
    num_heads, num_blocks = _count(source, raw, tensors)
    if raw.get("original_lm_head"):
        for index in range(1, num_heads):
            tensors.setdefault(_head(index), tensors[_head(0)])
    ids = None if token_map is None else _known_ids(source, token_map, target)
    if ids is not None:
        for name, tensor in tensors.items():
            if name.endswith(".lm_head.weight") and len(tensor) == target.vocab_size:
                tensors[name] = tensor[ids]
    num_rows, width = tensors[_head(0)].shape
    has_bias = any(name.endswith(".bias") for name in tensors)
    with torch.device("meta"):
        drafter = MedusaDrafter(num_heads, width, num_rows, num_blocks, has_bias=has_bias)
    drafter.choose_ids(None if ids is None else ids.to(target.device))
    check_sizes(drafter, target)
    _fill(drafter, tensors, target, source)
    return drafter


def _count(source: str, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Heads and residual blocks of each.  The authors' config.json may say fewer heads than there
    are; all are taken.

    Raises: CheckpointError.
    """
    parts = [name.split(".") for name in tensors if name.startswith("heads.")]
    if not parts or tensors.get(_head(0), torch.empty(0)).dim() != 2:
        raise CheckpointError(
            f"{source}: not a Medusa checkpoint: expected tensors such as 0.0.linear.weight and "
            "0.1.weight, or blocks.0.layers.0.weight and lm_heads.0.weight; got "
            f"{next(iter(tensors), 'none')}"
        )
    num_heads = 1 + max(int(part[1]) for part in parts)
    num_blocks = 1 + max((int(part[3]) for part in parts if part[2] == "blocks"), default=-1)
    said_heads = raw.get("medusa_num_heads", raw.get("num_heads", 0))
    said_blocks = raw.get("medusa_num_layers", num_blocks)
    if said_heads > num_heads or said_blocks != num_blocks:
        raise CheckpointError(
            f"{source}: config.json says {said_heads} heads of {said_blocks} residual blocks, the "
            f"tensors are those of {num_heads} of {num_blocks}; copy the checkpoint again"
        )
    return num_heads, num_blocks


def _known_ids(source: str, token_map: Tensor, target: TargetInfo) -> Tensor:
    """The target's ids that the heads know, int64.  Raises: CheckpointError."""
    ids = token_map.to(torch.int64)
    inside = bool(((ids >= 0) & (ids < target.vocab_size)).all())
    if ids.dim() != 1 or not inside or len(ids.unique()) < len(ids):
        raise CheckpointError(
            f"{source}: token_map: expected different ids below {target.vocab_size}, got "
            f"{list(ids.shape)} of {int(ids.min())} to {int(ids.max())}"
        )
    return ids


def _head(index: int) -> str:
    return f"heads.{index}.lm_head.weight"


def _fill(
    drafter: MedusaDrafter, tensors: dict[str, Tensor], target: TargetInfo, source: str
) -> None:
    place(tensors, target)
    load_strict(drafter, {name: x.detach() for name, x in tensors.items()}, source=source)
    drafter.requires_grad_(False).eval()


def random_heads(
    target: TargetInfo, num_heads: int = 4, *, num_blocks: int = 1, seed: int = 0
) -> MedusaDrafter:
    """Build random heads that fit `target`, in its dtype, on its device; hardly any of their drafts
    are accepted.

    Raises: InvalidOption.
    """
    if num_heads < 1 or num_blocks < 0:
        raise InvalidOption(
            f"random_heads: expected num_heads of 1 or more and num_blocks of 0 or more, got "
            f"{num_heads} and {num_blocks}"
        )
    with torch.device("meta"):
        drafter = MedusaDrafter(num_heads, target.hidden_size, target.vocab_size, num_blocks)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: like
        if traits_of(target.device).is_meta
        else random_tensor(name, like.shape, generator)
        for name, like in sorted(drafter.state_dict().items())
    }
    _fill(drafter, tensors, target, "random heads")
    return drafter
