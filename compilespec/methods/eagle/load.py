"""Reading and writing EAGLE-1 heads, and making random ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.methods.checkpoint import drop_training_only, read_config, read_tensors
from compilespec.methods.decoder_body import BODIES
from compilespec.methods.eagle.config import EagleConfig, read_eagle_config
from compilespec.methods.eagle.drafter import EagleDrafter
from compilespec.methods.eagle3.load import check_sizes
from compilespec.methods.eagle3.random_head import random_config
from compilespec.methods.eagle3.save import layer_fields
from compilespec.methods.parts.random import random_tensor
from compilespec.methods.parts.weights import fill, place
from compilespec.ops.device import traits_of
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)


def load_drafter(
    draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a module, checked against the target.

    A `Drafter` is adopted as it is; another module must have an EAGLE state_dict and its config.

    Raises:
        CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, Drafter):
        if isinstance(draft, EagleDrafter):
            check_sizes(draft.config, target)
        return draft
    if isinstance(draft, nn.Module):
        source, raw, tensors = f"draft module {type(draft).__name__}", *_take_apart(draft)
    elif isinstance(draft, str | Path):
        source, raw, tensors = str(draft), read_config(draft), read_tensors(draft)
    else:
        raise InvalidOption(
            f"draft: expected a directory or an nn.Module, got {type(draft).__name__}"
        )
    config = read_eagle_config(raw, {n: tensor.shape for n, tensor in tensors.items()}, source)
    drafter = _build(config, tensors, target, source)
    logger.info("%s: %s", source, drafter.describe())
    return drafter


def random_head(target: TargetInfo, *, seed: int = 0, **fields: Any) -> EagleDrafter:
    """Build a random head that fits `target`, in its dtype, on its device.

    Hardly any of its drafts are accepted, but it is a complete head: norm weights differ from 1,
    biases from 0.

    Args:
        target: sizes; its head is shared, and its embedding unless `own_embedding=True`.
        seed: seed of the weights.
        fields: any field of `EagleConfig`; `fc_bias` is True unless given.
    Raises:
        InvalidOption: an unknown field.
        DraftMismatch: fields that contradict the target.
    """
    body = str(fields.pop("body", "llama"))
    if body not in BODIES:
        raise not_one_of("random_head: body", body, BODIES)
    known = random_config(
        target, target.vocab_size, body, {"fc_bias": True, "own_lm_head": False, **fields}
    )
    config = EagleConfig(**{**vars(known), "aux_layers": (FINAL_NORM,)})
    with torch.device("meta"):
        names = EagleDrafter(config).state_dict()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: like
        if traits_of(target.device).is_meta
        else random_tensor(name, like.shape, generator)
        for name, like in sorted(names.items())
        if name != "lm_head.weight" and (config.own_embedding or name != "embed_tokens.weight")
    }
    return _build(config, tensors, target, "random head")


def save_head(drafter: Drafter, directory: str | Path) -> Path:
    """Write config.json and model.safetensors in the authors' layout; `Method.load` reads it back.

    Matrices shared with the target are left out; the layout has no field for K.

    Raises:
        InvalidOption: another kind of drafter.
    """
    if not isinstance(drafter, EagleDrafter):
        raise InvalidOption(f"save_head writes an EagleDrafter, got {type(drafter).__name__}")
    directory, config = Path(directory), drafter.config
    directory.mkdir(parents=True, exist_ok=True)
    rope = dict(config.rope)
    raw = {
        "architectures": [f"{config.body.capitalize()}ForCausalLM"],
        **layer_fields(config),
        "qkv_bias": config.qkv_bias,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "dtype": str(drafter.fc.weight.dtype).removeprefix("torch."),
    }
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    tensors = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in drafter.state_dict().items()
        if name != "lm_head.weight" and (config.own_embedding or name != "embed_tokens.weight")
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _take_apart(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a transformers-like module."""
    config: Any = getattr(module, "config", None)
    raw = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(raw, Mapping):
        raise DraftMismatch(
            f"draft module {type(module).__name__}: expected a compilespec Drafter, or a module "
            "with .config and an EAGLE state_dict (fc, layers.0.*)"
        )
    return dict(raw), drop_training_only(module.state_dict())


def _build(
    config: EagleConfig, tensors: dict[str, Tensor], target: TargetInfo, source: str
) -> EagleDrafter:
    """The module with its own tensors, and the target's head (and embedding) by identity."""
    check_sizes(config, target)
    place(tensors, target)
    with torch.device("meta"):
        drafter = EagleDrafter(config)
    shared = {"lm_head.weight": target.lm_head}
    own = tensors.get("embed_tokens.weight")
    if own is None or (own.shape == target.embedding.shape and torch.equal(own, target.embedding)):
        shared["embed_tokens.weight"] = target.embedding
    fill(drafter, tensors, shared, source=source, device=target.device)
    return drafter
