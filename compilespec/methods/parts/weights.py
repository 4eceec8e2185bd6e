"""Weights of drafters: filled from a checkpoint, frozen, or shared with the target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compilespec.methods.checkpoint import load_strict
from compilespec.methods.decoder_body import BodyConfig
from compilespec.tracing.target_info import TargetInfo


class Weight(nn.Module):
    """A matrix that may be the target's own: a shared parameter stays that parameter, a plain
    tensor becomes a buffer.
    """

    weight: Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def share(self, tensor: Tensor) -> None:
        """Hold `tensor` itself, not a copy."""
        del self.weight
        if isinstance(tensor, nn.Parameter):
            self.weight = tensor
        else:
            self.register_buffer("weight", tensor)


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
