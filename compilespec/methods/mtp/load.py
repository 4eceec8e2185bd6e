"""From a checkpoint directory, the target's own or another, to an `MtpDrafter`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import Chain
from compilespec.methods.checkpoint import load_strict, read_config, read_tensors, tensor_names
from compilespec.methods.mtp.config import MtpConfig, normalise
from compilespec.methods.mtp.drafter import MtpDrafter
from compilespec.methods.mtp.layout import canonical_tensors, module_names
from compilespec.methods.mtp.module import build_steps
from compilespec.methods.parts.weights import Weight
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)

CHAINS = ("module_rows", "target_rows")
SHARED = ("embed_tokens.weight", "lm_head.weight")


def load_drafter(
    draft: str | Path | nn.Module,
    target: TargetInfo,
    options: Mapping[str, Any],
    *,
    recycled: bool,
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a module, checked against the target.

    Args:
        draft: a directory, which may be the target's own; an `MtpDrafter`; or any `Drafter`.
        options: `pos0_mask` (bool); `chain` ("module_rows" | "target_rows") unless `recycled`.
        recycled: module 0 drafts every token; the other modules are not read.
    Raises:
        CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    chain, pos0_mask = _check_options(options)
    if isinstance(draft, Drafter):
        return _adopt(draft, target, options, recycled, chain)
    if isinstance(draft, nn.Module):
        raise DraftMismatch(
            f"draft module {type(draft).__name__}: expected a compilespec Drafter or a directory"
        )
    raw = read_config(draft)
    renamed = module_names(raw, tensor_names(draft))
    config = normalise(raw, renamed, pos0_mask=pos0_mask)
    check_sizes(config, target)
    kept = {old: new for old, new in renamed.items() if not recycled or new.startswith("steps.0.")}
    tensors = read_tensors(draft, only=kept)
    named = {new: tensors[old] for old, new in kept.items()}
    _share_parts(config, named, 1 if recycled else config.num_modules)
    drafter = build(
        config, canonical_tensors(named, raw, target.dtype), target, recycled=recycled, chain=chain,
        source=str(draft),
    )  # fmt: skip
    logger.info("%s: %s", draft, drafter.describe())
    return drafter


def build(
    config: MtpConfig,
    tensors: Mapping[str, Tensor],
    target: TargetInfo,
    *,
    recycled: bool,
    chain: Chain,
    source: str,
) -> MtpDrafter:
    """The modules with their own tensors, and the target's embedding and head by identity.

    Args:
        tensors: `steps.<i>.*` as in the drafter's state dict, in any dtype and on any device.
    Raises:
        CheckpointError: tensors missing, unexpected or misshapen.
    """
    num_steps = 1 if recycled else config.num_modules
    steps = build_steps(config, num_steps, experts_of(target))
    drafter = MtpDrafter(
        config, steps, recycled=recycled, chain=chain, num_target_layers=target.num_layers
    )
    placed = {name: _place(name, tensor, target) for name, tensor in tensors.items()}
    shared = _shared(placed, target, num_steps)
    complete = {name: tensor.detach() for name, tensor in {**placed, **shared}.items()}
    load_strict(drafter, complete, source=source)
    drafter.requires_grad_(False).eval()
    for step in drafter.steps:
        if step.rotary is not None:
            step.rotary.to(target.device)
    for name, tensor in shared.items():
        holder = drafter.get_submodule(name.removesuffix(".weight"))
        assert isinstance(holder, Weight)
        holder.share(tensor)
    return drafter


def experts_of(target: TargetInfo) -> str:
    """transformers' implementation of the experts' products: the target's, else the default.  That
    of a target without experts may be "eager", a loop that no graph holds.
    """
    usual = "batched_mm" if target.dtype == torch.float64 else "grouped_mm"
    chosen = getattr(target.config, "_experts_implementation", None)
    return usual if chosen in (None, "eager") else chosen


def check_sizes(config: MtpConfig, target: TargetInfo) -> None:
    """Compare the sizes that modules and target share.

    Raises:
        DraftMismatch: hidden size or vocabulary differ.
    """
    for what, got, wanted in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if got != wanted:
            raise DraftMismatch(
                f"the MTP modules have {what} {got}, the target has {wanted}: these are the "
                "modules of another target"
            )


def _check_options(options: Mapping[str, Any]) -> tuple[Chain, bool]:
    chain, mask = options.get("chain", "module_rows"), options.get("pos0_mask", False)
    if chain not in CHAINS:
        raise not_one_of("chain", chain, CHAINS)
    if not isinstance(mask, bool):
        raise InvalidOption(f"pos0_mask must be True or False, got {mask!r}")
    return chain, mask


def _adopt(
    draft: Drafter, target: TargetInfo, options: Mapping[str, Any], recycled: bool, chain: Chain
) -> Drafter:
    """Adopt a drafter unchanged, but use an `MtpDrafter`'s modules as this method does."""
    if not isinstance(draft, MtpDrafter) or "pos0_mask" in options:
        if options:
            raise InvalidOption(
                f"{', '.join(sorted(options))}: only for checkpoints, got a Drafter module"
            )
        return draft
    check_sizes(draft.config, target)
    if draft.recycled == recycled and options.get("chain", draft.chain) == draft.chain:
        return draft
    return MtpDrafter(
        draft.config, draft.steps, recycled=recycled,
        chain=chain if "chain" in options else draft.chain, num_target_layers=target.num_layers,
    )  # fmt: skip


def _share_parts(config: MtpConfig, named: dict[str, Tensor], num_steps: int) -> None:
    """Give every module the fc and norms that Qwen3-Next keeps once for all layers, and the
    target's last norm in ERNIE's.
    """
    if config.layout not in ("qwen3_next", "ernie"):
        return
    once = [name for name in named if name.startswith("steps.0.") and ".block." not in name]
    if config.layout == "ernie":
        once = ["steps.0.norm.weight"] if "steps.0.norm.weight" in named else []
    for index in range(1, num_steps):
        for name in once:
            named.setdefault(name.replace("steps.0.", f"steps.{index}.", 1), named[name])


def _place(name: str, tensor: Tensor, target: TargetInfo) -> Tensor:
    """Move to the target's device and cast floats to its dtype; experts' biases stay float32."""
    if not tensor.is_floating_point():
        return tensor.to(target.device)
    dtype = target.dtype
    if name.endswith("e_score_correction_bias"):
        dtype = torch.promote_types(dtype, torch.float32)
    return tensor.to(device=target.device, dtype=dtype)


def _shared(placed: Mapping[str, Tensor], target: TargetInfo, num_steps: int) -> dict[str, Tensor]:
    """The matrices shared with the target: absent in the checkpoint, or equal to the target's."""
    own = dict(zip(SHARED, (target.embedding, target.lm_head), strict=True))
    shared = {}
    for index in range(num_steps):
        for kind, tensor in own.items():
            got = placed.get(f"steps.{index}.{kind}")
            if got is None or _same(got, tensor):
                shared[f"steps.{index}.{kind}"] = tensor
    return shared


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (one.is_meta or torch.equal(one, other))
