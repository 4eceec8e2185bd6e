"""Muon for the matrices of the target's layers, AdamW for everything else, over processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.training.optim import orthogonalise

from . import workers
from .model import Shape, row_blocks


class MuonAdamW:
    """One optimiser over named parameters; matrices outside `adam_names` get Muon.

    Muon's update has the root mean square of an AdamW update (0.2), so one learning rate serves
    both.  Matrices of one size are orthogonalised in one batch; fused ones are split first.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], shape: Shape, *,
        adam_names: tuple[str, ...], momentum: float = 0.95, weight_decay: float = 0.1,
    ) -> None:  # fmt: skip
        self.momentum, self.weight_decay = momentum, weight_decay
        self.muon: list[tuple[str, nn.Parameter]] = []
        adam: list[nn.Parameter] = []
        for name, parameter in named:
            if parameter.ndim == 2 and not any(part in name for part in adam_names):
                self.muon.append((name, parameter))
            else:
                adam.append(parameter)
        self.adam = torch.optim.AdamW(
            adam, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, foreach=True
        )
        self.buffers = [torch.zeros_like(p) for _, p in self.muon]
        self.shape = shape

    def parameters(self) -> list[nn.Parameter]:
        """Return every parameter of both optimisers."""
        return [p for _, p in self.muon] + list(self.adam.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip the gradient norm at 1, update, clear the gradients; return the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        moves = []
        for (name, p), buffer in zip(self.muon, self.buffers, strict=True):
            assert p.grad is not None
            buffer.lerp_(p.grad, 1 - self.momentum)
            update = p.grad.lerp(buffer, self.momentum)
            moves.append(torch.zeros_like(p))
            blocks = list(row_blocks(name, self.shape) or (p.shape[0],))
            for move, u in zip(moves[-1].split(blocks), update.split(blocks), strict=True):
                pair = (move, u) if u.shape[0] <= u.shape[1] else (move.mT, u.mT)
                groups[u.shape[0], u.shape[1]].append(pair)
        for (rows, columns), pairs in groups.items():
            pairs = pairs[workers.rank() :: workers.count()]
            if not pairs:
                continue
            update = orthogonalise(torch.stack([u for _, u in pairs]))
            for (move, _), u in zip(pairs, update, strict=True):
                move.copy_(u).mul_(0.2 * max(rows, columns) ** 0.5)
        workers.add_up(moves)
        for (_, p), move in zip(self.muon, moves, strict=True):
            p.mul_(1 - lr * self.weight_decay).sub_(move, alpha=lr)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        for p in self.parameters():
            p.grad = None
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs."""
        return {"buffers": self.buffers, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        for mine, saved in zip(self.buffers, state["buffers"], strict=True):
            mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])
