"""The layouts of a DFlash checkpoint: where config.json keeps what, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from compilespec.errors import CheckpointError, NotSupported

Layout = Literal["speculators", "authors", "transformers"]

_OF_TRANSFORMERS = {  # defaults of the class that writes the layout
    "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 2048, "block_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip

# transformers' names of two modules, and ours
OTHER_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def read_layout(
    raw: Mapping[str, Any], kind: str
) -> tuple[Layout, Mapping[str, Any], tuple[Mapping[str, Any], ...]]:
    """Tell who wrote config.json (the layout), and return it with the fields of the decoder layers
    and the mappings that may hold the drafter's own fields, the first one to look in first.

    Args:
        kind: the only `speculators_model_type` that is accepted.

    Raises: CheckpointError, NotSupported.
    """
    given = raw.get("speculators_model_type")
    if given is not None:
        if given != kind:
            raise NotSupported(
                f"speculators_model_type {given!r}: {kind} loads {kind!r} only; give "
                f"spec={given!r} if that is a method"
            )
        body = raw.get("transformer_layer_config")
        if not isinstance(body, Mapping):
            raise CheckpointError(
                "config.json: speculators format without transformer_layer_config"
            )
        return "speculators", body, (raw,)
    nested = raw.get("dflash_config")
    if nested is None and "target_layer_ids" in raw:
        whole = {**_OF_TRANSFORMERS, **{k: v for k, v in raw.items() if v is not None}}
        return "transformers", whole, (whole,)
    return "authors", raw, (raw, nested or {})


def first_given(places: Sequence[Mapping[str, Any]], key: str, default: Any) -> Any:
    """The value under `key` of the first of `places` that has one."""
    return next((place[key] for place in places if place.get(key) is not None), default)


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the drafter module's names."""
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((old for old in OTHER_NAMES if name.startswith(old)), "")
        renamed[OTHER_NAMES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed


def check_names(source: str, tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes, of a checkpoint that is one of this method.  Raises: CheckpointError."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    missing = [name for name in ("fc.weight", "hidden_norm.weight") if name not in shapes]
    if missing or len(shapes["fc.weight"]) != 2:
        raise CheckpointError(
            f"{source}: not a DFlash checkpoint: expected fc.weight and hidden_norm.weight (or "
            f"encoder.fc.weight and encoder.output_norm_enc.weight), got "
            f"{', '.join(sorted(shapes)[:4]) or 'no tensors'}, ..."
        )
    return shapes
