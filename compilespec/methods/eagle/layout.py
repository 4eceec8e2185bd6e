"""The layout of an EAGLE-1 checkpoint, the authors': how it is recognised, and its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.decoder_body import BODIES, named_body


def check_layout(raw: Mapping[str, Any], shapes: Mapping[str, torch.Size], source: str) -> None:
    """Refuse other checkpoints, and say which.  Raises: CheckpointError, NotSupported."""
    if "speculators_model_type" in raw:
        raise NotSupported(
            f"{source}: speculators_model_type {raw['speculators_model_type']!r}; spec='eagle' "
            "reads the EAGLE authors' layout (fc.weight, layers.0.*): convert it, or use another "
            "spec="
        )
    if any(name.startswith("midlayer.") or "hidden_norm." in name for name in shapes):
        raise CheckpointError(
            f"{source} is an EAGLE-3 head (hidden_norm tensors); give spec='eagle3'"
        )
    if any(".experts." in name or "kv_a_proj" in name for name in shapes):
        raise NotSupported(
            f"{source}: EAGLE with an MLA or mixture-of-experts body is not built; bodies: "
            + ", ".join(BODIES)
        )
    if "fc.weight" not in shapes:
        raise CheckpointError(
            f"{source} is not an EAGLE checkpoint: expected fc.weight and layers.0.*, got "
            f"{', '.join(sorted(shapes)[:4]) or 'no tensors'}, ..."
        )


def read_body(fields: Mapping[str, Any]) -> str:
    """The model type, or else the body in the architecture's name; llama if neither says."""
    model_type = fields.get("model_type")
    if model_type in BODIES:
        return str(model_type)
    architectures = [str(name) for name in fields.get("architectures") or ()]
    named = named_body(architectures)
    if named or (model_type is None and not architectures):
        return named or "llama"
    raise NotSupported(
        f"EAGLE body {model_type!r} (architectures {architectures}) is not built; bodies: "
        f"{', '.join(BODIES)}"
    )
