"""Multi-token-prediction modules as in DeepSeek-V3: module i predicts one token further.

Row t of module i joins the previous module's output at t (the target's last hidden, after the final
norm, for module 0) with the embedding of x[t+1+i], runs one causal decoder layer over its own rows
and predicts x[t+2+i] through the target's tied head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import workers
from .acceptance import Scores, acceptance_length
from .eagle import BATCH, LENGTH, PROMPT, STEP_WEIGHTS, UNROLL, mixed_windows
from .loop import Run, train
from .model import Layer, LeanLlama, Shape, decoder_layer, matrix, rms_norm, rope_table
from .optim import MuonAdamW

NUM_MODULES = 3
MODULE_SHAPE = Shape(num_hidden_layers=NUM_MODULES)


class MtpModule(nn.Module):
    """Weights of one module; embedding and head are the target's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        D = shape.hidden_size
        self.enorm = nn.Parameter(torch.ones(D))
        self.hnorm = nn.Parameter(torch.ones(D))
        self.eh_proj = matrix(D, 2 * D)
        self.layer = Layer(shape, D, 0.02 / 2**0.5)
        self.head_norm = nn.Parameter(torch.ones(D))


class MtpModules(nn.Module):
    """The chain of modules."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.modules_list = nn.ModuleList(MtpModule(shape) for _ in range(shape.num_hidden_layers))

    def unroll(self, hidden_BTD: Tensor, embed: Tensor, ids_BL: Tensor) -> list[Tensor]:
        """Return each module's normed output [B, T, D] along ids (L at least T + modules)."""
        eps, T = self.shape.rms_norm_eps, hidden_BTD.shape[1]
        outputs = []
        for i, module in enumerate(self.modules_list):
            assert isinstance(module, MtpModule)
            e = F.embedding(ids_BL[:, 1 + i : 1 + i + T], embed)
            pair = [rms_norm(e, module.enorm, eps), rms_norm(hidden_BTD, module.hnorm, eps)]
            cos, sin = rope_table(self.shape, torch.arange(i, T + i))
            x = F.linear(torch.cat(pair, -1), module.eh_proj)
            x = decoder_layer(self.shape, x, cos, sin, *module.layer.tensors())
            hidden_BTD = rms_norm(x, module.head_norm, eps)
            outputs.append(hidden_BTD)
        return outputs


@torch.no_grad()
def last_hidden(target: LeanLlama, ids_BL: Tensor) -> Tensor:
    """Return the target's last hidden state after its final norm."""
    hidden = target.hidden_states(ids_BL)[-1]
    return rms_norm(hidden, target.norm, target.shape.rms_norm_eps)


@torch.no_grad()
def score(modules: MtpModules, target: LeanLlama, ids_BL: Tensor) -> Scores:
    """Score every module's draft along sequences the target generated."""
    T = ids_BL.shape[1] - 1 - NUM_MODULES
    hidden = last_hidden(target, ids_BL)
    top, ratio = [], []
    for j, output in enumerate(modules.unroll(hidden[:, :T], target.embed, ids_BL)):
        q = torch.softmax(F.linear(output, target.embed), -1)
        p = torch.softmax(F.linear(hidden[:, 1 + j : 1 + j + T], target.embed), -1)
        truth = ids_BL[:, 2 + j : 2 + j + T, None]
        top.append(q.argmax(-1) == truth[..., 0])
        ratio.append((q.gather(-1, truth) / p.gather(-1, truth)).squeeze(-1))
    return Scores(top=torch.stack(top, -1), ratio=torch.stack(ratio, -1))


def train_mtp(
    target: LeanLlama, splits: dict[str, Tensor], generated: dict[str, Tensor], *, folder: Path,
    steps: int, decay_steps: int, lr: float, seed: int, stop_at: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train (or resume) the modules against the target's distributions."""
    torch.manual_seed(seed + 3)
    target.compile()
    modules = MtpModules(MODULE_SHAPE)
    optimizer = MuonAdamW(modules.named_parameters(), MODULE_SHAPE, adam_names=())

    def loss_at(step: int, _: bool) -> tuple[Tensor, dict[str, float]]:
        ids = workers.mine(mixed_windows(splits, generated, seed=seed + 3, step=step))
        hidden = last_hidden(target, ids)
        probs = torch.softmax(F.linear(hidden, target.embed), -1)
        total, extra = torch.zeros(()), {}
        for j, output in enumerate(modules.unroll(hidden[:, :LENGTH], target.embed, ids)):
            logq = F.log_softmax(F.linear(output, target.embed), -1)
            part = -(probs[:, 1 + j : 1 + j + LENGTH] * logq).sum(-1).mean()
            total = total + STEP_WEIGHTS[j] / sum(STEP_WEIGHTS) * part
            extra[f"loss_{j}"] = float(part.detach())
        return total, extra

    def evaluate() -> dict[str, float]:
        return {
            f"length_{name}": acceptance_length(
                score(modules, target, generated[f"eval_{name}"]),
                PROMPT, UNROLL, greedy=name == "greedy",
            )
            for name in ("greedy", "sampled")
        }  # fmt: skip

    run = Run(
        part="mtp", folder=folder, steps=steps, decay_steps=decay_steps, lr=lr,
        tokens_per_step=BATCH * LENGTH, stop_at=stop_at,
    )  # fmt: skip
    return train(run, modules, optimizer, loss_at, evaluate)


def load_trained_modules(folder: Path) -> MtpModules:
    """Return the modules of the newest training checkpoint."""
    modules = MtpModules(MODULE_SHAPE)
    modules.load_state_dict(torch.load(folder / "mtp.pt")["model"])
    return modules.requires_grad_(False)
