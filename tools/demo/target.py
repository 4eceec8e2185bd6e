"""Training of the demo target."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import workers
from .corpus import sample_windows
from .loop import Run, train
from .model import LeanLlama, Shape
from .optim import MuonAdamW

TARGET_SHAPE = Shape()
BATCH, LENGTH = 16, 256
# In the decay phase some steps read longer windows, so that long outputs stay coherent.
LONG_BATCH, LONG_LENGTH, LONG_ONE_IN = 4, 1024, 3
# Share of windows from the standard library, before and in the decay phase.
STDLIB_SHARES = (0.6, 0.9)


def train_target(
    splits: dict[str, Tensor], *, folder: Path, steps: int, decay_steps: int, lr: float,
    seed: int, stop_at: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train (or resume) the target; the checkpoint and the log stay in `folder`."""
    torch.manual_seed(seed)
    model = LeanLlama(TARGET_SHAPE)
    plain = copy.copy(model)  # evaluation has other sizes: do not compile for them
    model.compile()
    optimizer = MuonAdamW(model.named_parameters(), TARGET_SHAPE, adam_names=("embed",))

    def loss_at(step: int, decaying: bool) -> tuple[Tensor, dict[str, float]]:
        long = decaying and step % LONG_ONE_IN == 0
        ids = sample_windows(
            splits,
            batch=LONG_BATCH if long else BATCH,
            length=(LONG_LENGTH if long else LENGTH) + 1,
            stdlib_share=STDLIB_SHARES[decaying],
            seed=seed,
            step=step,
        )
        return model.loss(workers.mine(ids)), {}

    run = Run(
        part="target", folder=folder, steps=steps, decay_steps=decay_steps, lr=lr,
        tokens_per_step=BATCH * LENGTH, stop_at=stop_at,
    )  # fmt: skip
    return train(run, model, optimizer, loss_at, lambda: held_out_loss(plain, splits, windows=64))


@torch.no_grad()
def held_out_loss(
    model: LeanLlama, splits: dict[str, Tensor], *, windows: int | None = None, length: int = LENGTH
) -> dict[str, float]:
    """Return the loss over the first evenly spaced (or all) held-out windows of `length`."""
    stream = splits["held_out"].long()
    starts = torch.arange(0, stream.numel() - length - 1, length)
    if windows is not None:
        starts = starts[torch.linspace(0, starts.numel() - 1, windows).long()]
    ids = torch.stack([stream[s : s + length + 1] for s in starts.tolist()])
    losses = [float(model.loss(part)) * part.shape[0] for part in ids.split(BATCH)]
    return {"loss": sum(losses) / ids.shape[0]}


def load_trained_target(folder: Path) -> LeanLlama:
    """Return the target of the newest training checkpoint."""
    model = LeanLlama(TARGET_SHAPE)
    model.load_state_dict(torch.load(folder / "target.pt")["model"])
    return model.requires_grad_(False)
