"""The demo's drafters: `compilespec.training` on the corpus and on what the target writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compilespec
from compilespec.training.data import Prompt
from compilespec.training.draft_model import DraftModelTraining
from compilespec.training.entry import Listener, TrainResult, train
from compilespec.training.files import replace_text
from compilespec.training.generation import GENERATED, generate_answers
from compilespec.training.method import TrainingMethod
from compilespec.training.options import TrainOptions

from .corpus import sample_windows

PROMPT, LENGTH = 64, 256
STDLIB_SHARE = 0.8
TEMPERATURES = (0.0, 1.0)

COMMON: Mapping[str, Any] = {
    "batch_tokens": 4096, "max_length": LENGTH, "learning_rate": 7e-3, "warmup_steps": 60,
    "compiled": True, "patience": 1_000,
}  # fmt: skip
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {"steps": 642, "decay_share": 0.78, "draft_vocab_size": 1536,
               "intermediate_size": 768},
    "mtp": {"steps": 500, "decay_share": 0.6},
    "draft_model": {"steps": 700, "decay_share": 0.28, "learning_rate": 3e-3,
                    "intermediate_size": 448},
}  # fmt: skip
METHODS: Mapping[str, TrainingMethod] = {
    "draft_model": DraftModelTraining(num_layers=2, head_dim=32, share=2)
}


def write_text(
    model: Path, splits: dict[str, Tensor], folder: Path, *, count: int, seed: int = 0,
    backend: str = "inductor",
) -> Path:  # fmt: skip
    """Write what drafters learn from: `count` windows of the corpus, and as many that begin with
    windows' first tokens and were written on by the target, half of them greedily.

    Returns: the folder.  An interrupted call goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.jsonl"
    if not path.exists():
        records = ({"prompt_token_ids": w[:1], "token_ids": w[1:], "domain": "corpus"}
                   for w in windows(splits, count, LENGTH, seed))  # fmt: skip
        replace_text(path, "".join(json.dumps(one) + "\n" for one in records))
    prompts = [
        Prompt(prompt=ids, domain="written") for ids in windows(splits, count, PROMPT, seed + 1)
    ]
    with compilespec.compile(
        str(model), "none", max_batch_size=16, max_seq_len=LENGTH, backend=backend
    ) as engine:
        generate_answers(
            engine, prompts, folder / GENERATED, max_new_tokens=LENGTH - PROMPT,
            temperatures=TEMPERATURES,
        )  # fmt: skip
    return folder


def windows(splits: dict[str, Tensor], count: int, length: int, seed: int) -> Iterable[list[int]]:
    """Random windows of the training text."""
    for step in range(count):
        yield from sample_windows(
            splits, batch=1, length=length, stdlib_share=STDLIB_SHARE, seed=seed, step=step
        ).tolist()


def train_drafter(
    part: str, model: Path, text: Path, output: Path, *, listener: Listener | None = None,
    **changes: Any,
) -> TrainResult:  # fmt: skip
    """Train a drafter in `output`, or go on with it."""
    return train(
        str(model), text, output, method=METHODS.get(part, part), resume=True,
        options=options_of(part, **changes), listener=listener,
    )  # fmt: skip


def options_of(part: str, **changes: Any) -> TrainOptions:
    """Those of the released checkpoints, but for `changes`."""
    return TrainOptions(**{**COMMON, **OPTIONS[part], **changes})


def held_out_prompts(splits: dict[str, Tensor], count: int, length: int) -> Tensor:
    """`count` evenly spaced windows [count, length] of the held-out text."""
    stream = splits["held_out"].long()
    starts = torch.linspace(0, stream.numel() - length, count).long()
    return torch.stack([stream[s : s + length] for s in starts.tolist()])
