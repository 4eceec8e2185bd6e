"""From a checkpoint directory or a module to an `Eagle3Drafter` that fits its target."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption
from compilespec.methods.base import Drafter
from compilespec.methods.checkpoint import (
    drop_training_only,
    load_strict,
    read_config,
    read_tensors,
)
from compilespec.methods.decoder_body import BodyConfig
from compilespec.methods.eagle3.config import Eagle3Config, normalise
from compilespec.methods.eagle3.drafter import Eagle3Drafter
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)

LEGACY_NAMES = {
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def load_drafter(
    draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a module, checked against the target.

    A `Drafter` is adopted as it is; another module must have an EAGLE-3 state_dict and its config.

    Raises:
        CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, Drafter):
        return adopt(draft, target, options)
    source, raw, tensors = read_head(draft)
    drafter = _build(source, raw, tensors, target, options)
    logger.info("%s: %s", source, drafter.describe())
    return drafter


def adopt(drafter: Drafter, target: TargetInfo, options: Mapping[str, Any]) -> Drafter:
    """A drafter as it is, checked.  Raises: DraftMismatch, InvalidOption."""
    if options:
        raise InvalidOption(
            f"{', '.join(sorted(options))}: only for checkpoints, got a Drafter module"
        )
    check_drafter(drafter, target)
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


def check_drafter(drafter: Drafter, target: TargetInfo) -> None:
    """Check the attributes of any drafter of this method, and the target sizes of an
    `Eagle3Drafter`.

    Raises:
        DraftMismatch: attributes missing or impossible, or sizes that are not the target's.
    """
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
    if isinstance(drafter, Eagle3Drafter):
        check_sizes(drafter.config, target)


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


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of every layout to the drafter module's names.

    `midlayer.` becomes `layers.0.`, `midlayer.{i}.` becomes `layers.{i}.`, `aux_norm_low.` and so
    on `fc_norm.{i}.`.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name)
        new = re.sub(r"^midlayer\.", "layers.0.", new)
        for old_prefix, new_prefix in LEGACY_NAMES.items():
            new = new_prefix + new.removeprefix(old_prefix) if new.startswith(old_prefix) else new
        if new in renamed:
            raise CheckpointError(
                f"tensor {new} appears twice, once as {name}; the checkpoint mixes two layouts"
            )
        renamed[new] = tensor
    return renamed


def check_d2t(d2t: Tensor, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int) -> None:
    """Check that d2t holds offsets (target id = draft id + d2t), agreeing with the mask t2d.

    A map of ABSOLUTE ids (as FR-Spec's) is recognised by the mask; without one, by ids beyond the
    vocabulary, or because it rises at every step, which offsets do only if no two neighbouring
    tokens are kept.

    Raises:
        CheckpointError: the map is absolute, not ascending, out of range or contradicts t2d.
    """
    if d2t.shape != (draft_vocab_size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise CheckpointError(
            f"d2t: expected {draft_vocab_size} integers, got {d2t.dtype} {list(d2t.shape)} "
            "(draft_vocab_size in config)"
        )
    offsets = d2t.to(torch.int64).cpu()
    target_ids = torch.arange(draft_vocab_size) + offsets
    steps = offsets.diff()
    rising = bool((steps > 0).all()) and draft_vocab_size > 1
    advice = "expected offsets, target id = draft id + d2t[draft id]"
    if t2d is not None:
        if t2d.shape != (vocab_size,):
            raise CheckpointError(f"t2d: expected a mask of {vocab_size}, got {list(t2d.shape)}")
        kept = t2d.cpu().to(torch.bool).nonzero().flatten()
        if torch.equal(kept, target_ids):
            return
        if torch.equal(kept, offsets):
            raise CheckpointError(f"d2t holds absolute target ids; {advice}")
        raise CheckpointError(
            f"d2t and t2d contradict each other: t2d keeps {len(kept)} other tokens; {advice}"
        )
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size or rising:
        guess = (
            "d2t looks like absolute target ids"
            if rising
            else "d2t points outside the target vocabulary"
        )
        raise CheckpointError(f"{guess}, and there is no t2d to check it with; {advice}")
    if bool((steps < 0).any()):
        raise CheckpointError(f"d2t decreases, so two draft ids may mean one target id; {advice}")


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


def place(tensors: dict[str, Tensor], target: TargetInfo) -> None:
    """Move the tensors to the target's device, and cast the floating ones to its dtype."""
    for name, tensor in tensors.items():
        dtype = target.dtype if tensor.is_floating_point() else torch.int64
        tensors[name] = tensor.to(device=target.device, dtype=dtype)


def fill(
    drafter: nn.Module,
    tensors: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    *,
    source: str,
    device: torch.device,
) -> None:
    """Load and freeze the drafter's own tensors, then share the target's by identity.

    `drafter` has a `rope`, and a `Weight` for every shared tensor.
    """
    unshared = {name: tensor.detach() for name, tensor in {**tensors, **shared}.items()}
    load_strict(drafter, unshared, source=source)
    drafter.requires_grad_(False).eval()
    drafter.rope.to(device)
    for name, tensor in shared.items():
        drafter.get_submodule(name.removesuffix(".weight")).share(tensor)  # type: ignore[operator]


def shared_matrices(
    config: BodyConfig, tensors: Mapping[str, Tensor], target: TargetInfo
) -> dict[str, Tensor]:
    """The matrices shared with the target: absent in the checkpoint, or equal to the target's."""
    candidates = (
        ("embed_tokens.weight", config.own_embedding, target.embedding),
        ("lm_head.weight", config.own_lm_head, target.lm_head),
    )
    shared = {}
    for name, own, tensor in candidates:
        got = tensors.get(name)
        same = got is not None and got.shape == tensor.shape and torch.equal(got, tensor)
        if same or not own:
            shared[name] = tensor
    return shared
