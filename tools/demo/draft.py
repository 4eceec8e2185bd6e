"""A small draft model in the target's own layout, distilled from the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import workers
from .acceptance import Scores, acceptance_length
from .eagle import BATCH, LENGTH, PROMPT, UNROLL, mixed_windows
from .loop import Run, train
from .model import LeanLlama, Shape
from .optim import MuonAdamW

DRAFT_SHAPE = Shape(
    num_hidden_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=448,
)  # fmt: skip


@torch.no_grad()
def score(draft: LeanLlama, target: LeanLlama, ids_BL: Tensor, depth: int) -> Scores:
    """Score the draft model along the target's text; a step depends on accepted tokens only."""
    T = ids_BL.shape[1] - 1 - depth
    q = torch.softmax(draft.logits(draft.hidden_states(ids_BL)[-1]), -1)
    p = torch.softmax(target.logits(target.hidden_states(ids_BL)[-1]), -1)
    top, ratio = [], []
    for j in range(depth):
        truth = ids_BL[:, 2 + j : 2 + j + T, None]
        here = slice(1 + j, 1 + j + T)
        top.append(q[:, here].argmax(-1) == truth[..., 0])
        ratio.append((q[:, here].gather(-1, truth) / p[:, here].gather(-1, truth)).squeeze(-1))
    return Scores(top=torch.stack(top, -1), ratio=torch.stack(ratio, -1))


def train_draft(
    target: LeanLlama, splits: dict[str, Tensor], generated: dict[str, Tensor], *, folder: Path,
    steps: int, decay_steps: int, lr: float, seed: int, stop_at: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train (or resume) the draft model against the target's distributions."""
    torch.manual_seed(seed + 4)
    target.compile()
    model = LeanLlama(DRAFT_SHAPE)
    model.compile()
    optimizer = MuonAdamW(model.named_parameters(), DRAFT_SHAPE, adam_names=("embed",))

    def loss_at(step: int, _: bool) -> tuple[Tensor, dict[str, float]]:
        ids = mixed_windows(splits, generated, seed=seed + 4, step=step)[:, :LENGTH]
        ids = workers.mine(ids)
        with torch.no_grad():
            probs = torch.softmax(target.logits(target.hidden_states(ids)[-1]), -1)
        logq = F.log_softmax(model.logits(model.hidden_states(ids)[-1]), -1)
        return -(probs * logq).sum(-1).mean(), {}

    def evaluate() -> dict[str, float]:
        return {
            f"length_{name}": acceptance_length(
                score(model, target, generated[f"eval_{name}"], UNROLL),
                PROMPT, UNROLL, greedy=name == "greedy",
            )
            for name in ("greedy", "sampled")
        }  # fmt: skip

    run = Run(
        part="draft", folder=folder, steps=steps, decay_steps=decay_steps, lr=lr,
        tokens_per_step=BATCH * LENGTH, stop_at=stop_at,
    )  # fmt: skip
    return train(run, model, optimizer, loss_at, evaluate)


def load_trained_draft(folder: Path) -> LeanLlama:
    """Return the draft model of the newest training checkpoint."""
    model = LeanLlama(DRAFT_SHAPE)
    model.load_state_dict(torch.load(folder / "draft.pt")["model"])
    return model.requires_grad_(False)
