"""Muon for the matrices of the layers, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Polar Express coefficients (Amsel et al. 2025), the first four steps.
POLAR_STEPS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)
MOMENTUM, WEIGHT_DECAY, ADAM_SCALE = 0.95, 0.1, 0.1


class MuonAdamW:
    """One optimiser over named parameters; matrices whose names hold one of `adam_names` get AdamW.

    Muon's update has the root mean square of an AdamW update (0.2), so one learning rate serves
    both.  Matrices of one size are orthogonalised in one batch.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, adam_names: Iterable[str]
    ) -> None:
        names = tuple(adam_names)
        self.muon: list[nn.Parameter] = []
        adam: list[nn.Parameter] = []
        for name, parameter in named:
            if parameter.requires_grad:
                by_muon = parameter.ndim == 2 and not any(part in name for part in names)
                (self.muon if by_muon else adam).append(parameter)
        self.adam = torch.optim.AdamW(
            adam, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, foreach=True
        )
        self.momenta = [torch.zeros_like(p) for p in self.muon]

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of both."""
        return [*self.muon, *self.adam.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Clip the gradients' norm at 1, update, clear the gradients; returns the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        groups: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter, momentum in zip(self.muon, self.momenta, strict=True):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)
            wide = update if update.shape[0] <= update.shape[1] else update.mT
            groups[wide.shape].append((parameter, wide))
        for (rows, columns), pairs in groups.items():
            scale = learning_rate * 0.2 * max(rows, columns) ** 0.5
            updates = orthogonalise(torch.stack([update for _, update in pairs]))
            for (parameter, _), update in zip(pairs, updates, strict=True):
                parameter.mul_(1 - learning_rate * WEIGHT_DECAY)
                same = update.shape == parameter.shape
                parameter.sub_(update if same else update.mT, alpha=scale)
        self.adam.param_groups[0]["lr"] = learning_rate * ADAM_SCALE
        self.adam.step()
        for parameter in self.parameters():
            parameter.grad = None
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for mine, saved in zip(self.momenta, state["momenta"], strict=True):
            mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])


def orthogonalise(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each [rows <= columns] matrix, roughly."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in POLAR_STEPS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x
