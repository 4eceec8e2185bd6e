"""A short digest of a model's weights, by which a drafter knows the target that it learned from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

KEY = "target_fingerprint"  # in config.json of a drafter
NUM_VALUES = 16  # of each weight


def fingerprint(weights: Mapping[str, Tensor]) -> str | None:
    """The digest of a captured target's weights; None where some are quantized.

    Source of each: a few values of every matrix, as bfloat16, so that a cast changes nothing.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name]
        if type(weight) not in (Tensor, torch.nn.Parameter):
            return None
        if weight.dim() < 2 or not weight.is_floating_point():
            continue
        flat = weight.detach().reshape(-1)
        values = flat[:: max(1, len(flat) // NUM_VALUES)][:NUM_VALUES].to("cpu", torch.bfloat16)
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
