"""Text that the target writes itself: the head is judged on it, so it also trains on it."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from . import workers
from .corpus import sample_windows
from .eagle import LENGTH, PROMPT, UNROLL
from .model import LeanLlama, generate

BATCH = 128
EVAL_PROMPTS = 64


def held_out_prompts(splits: dict[str, Tensor], count: int, length: int) -> Tensor:
    """Return `count` evenly spaced windows [count, length] of the held-out text."""
    stream = splits["held_out"].long()
    starts = torch.linspace(0, stream.numel() - length, count).long()
    return torch.stack([stream[s : s + length] for s in starts.tolist()])


def generate_texts(
    target: LeanLlama, splits: dict[str, Tensor], *, folder: Path, count: int, seed: int
) -> dict[str, Tensor]:
    """Return `count` training sequences of each kind, and those for evaluation.

    Batches are files in `folder`, so an interrupted run resumes and processes share the work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["greedy", "sampled"] * -(-count // BATCH) + ["eval_greedy", "eval_sampled"]
    new = LENGTH + UNROLL - PROMPT
    for i in track(workers.mine(torch.arange(len(kinds))).tolist(), description="generated text"):
        path = folder / f"{i}.pt"
        if path.exists():
            continue
        if kinds[i].startswith("eval"):
            prompts = held_out_prompts(splits, EVAL_PROMPTS, PROMPT)
        else:
            prompts = sample_windows(
                splits, batch=BATCH, length=PROMPT, stdlib_share=0.8, seed=seed + 2, step=i
            )
        temperature = 0.0 if kinds[i].endswith("greedy") else 1.0
        rows = generate(target, prompts, new, temperature=temperature, seed=seed + i)
        torch.save(rows, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    workers.wait()
    texts: dict[str, list[Tensor]] = {}
    for i, kind in enumerate(kinds):
        texts.setdefault(kind, []).append(torch.load(folder / f"{i}.pt"))
    return {kind: torch.cat(rows) for kind, rows in texts.items()}
