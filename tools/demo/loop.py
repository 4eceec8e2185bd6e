"""The target's training loop: schedule, log, resumable checkpoints, progress."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from . import workers
from .optim import MuonAdamW

CHECKPOINT_SECONDS = 180.0
WARMUP_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Run:
    """One part's training: a trapezoid schedule whose decay may be started early.

    A file `<part>.decay` in the folder starts the decay at once, before `steps`; the log
    then shows the step count to give a run that repeats this one.
    """

    part: str
    folder: Path
    steps: int
    decay_steps: int
    lr: float
    # Logged beside each loss so that curves of different batch sizes compare.
    tokens_per_step: int
    eval_every: int = 250
    # Stop here with a checkpoint, without decay (None: run to the end).
    stop_at: int | None = None


def train(
    run: Run, model: nn.Module, optimizer: MuonAdamW,
    loss_at: Callable[[int, bool], tuple[Tensor, dict[str, float]]],
    evaluate: Callable[[], dict[str, float]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Train from the newest checkpoint of the part, or from scratch.

    Args:
        loss_at: step number and "in the decay phase" to a loss and extra numbers for the log.
        evaluate: held-out numbers, called every `eval_every` steps and at the end.
    Returns:
        The records of the steps of this call (the JSONL log has those of earlier calls too).
    """
    lead = workers.rank() == 0
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / f"{run.part}.{workers.rank()}.pid").write_text(f"{os.getpid()}\n")
    checkpoint, log_path = run.folder / f"{run.part}.pt", run.folder / f"{run.part}.jsonl"
    decay_file = run.folder / f"{run.part}.decay"
    step, steps, seconds = 0, run.steps, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seconds = state["step"], state["seconds"]
        steps = state["steps"] if state["decaying"] else run.steps
        if lead:
            lines = log_path.read_text().splitlines(keepends=True)
            log_path.write_text("".join(x for x in lines if json.loads(x)["step"] < step))
    elif lead:
        log_path.unlink(missing_ok=True)
    last = steps if run.stop_at is None else run.stop_at
    records: list[dict[str, Any]] = []
    console = Console()
    columns = (TextColumn(run.part), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("loss {task.fields[loss]:.3f}"))  # fmt: skip
    with Progress(
        *columns, console=console, disable=not (lead and console.is_terminal)
    ) as progress:
        bar = progress.add_task(run.part, total=last, completed=step, loss=float("nan"))
        saved_at = time.monotonic()
        while step < last:
            started = time.monotonic()
            decaying = step >= steps - run.decay_steps
            lr = run.lr * learning_rate(step, steps, run.decay_steps)
            loss, extra = loss_at(step, decaying)
            loss.backward()
            wish = lead and run.stop_at is None and decay_file.exists()
            shared = torch.tensor([float(loss.detach()), *extra.values(), float(wish)])
            workers.add_up([*gradients(optimizer), shared], scale=1 / workers.count())
            values = [round(v, 5) for v in shared.tolist()]
            norm = optimizer.step(lr)
            if values[-1] > 0:
                last = steps = min(steps, step + 1 + run.decay_steps)
                decay_file.unlink(missing_ok=True)
            seconds += time.monotonic() - started
            record: dict[str, Any] = {
                "step": step, "loss": values[0], "lr": round(lr, 7),
                "norm": round(norm, 3), "tokens": (step + 1) * run.tokens_per_step,
                "seconds": round(seconds, 1), **dict(zip(extra, values[1:-1], strict=True)),
            }  # fmt: skip
            step += 1
            if not lead:
                continue
            if step % run.eval_every == 0 or step == last:
                record |= {f"held_out_{k}": round(v, 5) for k, v in evaluate().items()}
            records.append(record)
            with log_path.open("a") as log:
                log.write(json.dumps(record) + "\n")
            progress.update(bar, completed=step, total=last, loss=record["loss"])
            if not console.is_terminal and (step % 25 == 0 or step == last):
                console.print(json.dumps(record), soft_wrap=True)
            if step == last or time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                saved_at = time.monotonic()
                _save(
                    checkpoint, model, optimizer, step=step, steps=steps, seconds=seconds,
                    decaying=step >= steps - run.decay_steps,
                )  # fmt: skip
    return records


def _save(path: Path, model: nn.Module, optimizer: MuonAdamW, **progress: Any) -> None:
    """Write a checkpoint whole, or leave the one that is there."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def gradients(optimizer: MuonAdamW) -> list[Tensor]:
    """Return the gradient of every parameter."""
    grads = [p.grad for p in optimizer.parameters()]
    return [g for g in grads if g is not None]


def learning_rate(step: int, steps: int, decay_steps: int) -> float:
    """Return the factor of the trapezoid: linear warm-up, flat, linear decay to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / decay_steps)
