"""Random weights of drafters, and the aux layers that they read by default."""

from __future__ import annotations

import torch
from torch import Tensor


def random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Norm weights around 1, biases around 0, matrices that keep the scale of their input."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    return noise * (1.0 if name == "embed_tokens.weight" else shape[-1] ** -0.5)


def spread_aux_layers(num_target_layers: int) -> tuple[int, ...]:
    """The usual hs indices (2, n//2, n-3) where they differ, else up to three before the last."""
    n = num_target_layers
    if 2 < n // 2 < n - 3:
        return (2, n // 2, n - 3)
    first = max(0, n - 3)
    return tuple(range(first, min(first + 3, n + 1)))
