"""Small runs of the trainer: a tiny target, and texts that it wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compilespec.training.options import TrainOptions
from tests.support.models import tiny_target


def tiny_teacher() -> nn.Module:
    """A llama of 7 layers with an EOS that it never says."""
    return tiny_target("llama", dtype=torch.float32)


def quick_options(**changes: Any) -> TrainOptions:
    """A few small steps, measured on the eager backend."""
    given: dict[str, Any] = {
        "steps": 6, "batch_tokens": 128, "max_length": 48, "warmup_steps": 2, "eval_every": 100,
        "eval_prompts": 3, "eval_new_tokens": 8, "backend": "eager", "save_every": 2,
        "held_out_one_in": 4,
    }  # fmt: skip
    return TrainOptions(**{**given, **changes})


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def written_by(model: Any, path: Path, *, count: int = 24, seed: int = 0) -> Path:
    """Greedy continuations of random prompts, as the trainer's own generation would write them."""
    rng = torch.Generator().manual_seed(seed)
    records = []
    for number in range(count):
        length = 3 + number % 5
        prompt = torch.randint(model.config.vocab_size, (1, length), generator=rng)
        output = model.generate(
            prompt, max_new_tokens=17 + number % 7, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        ids = output[0].tolist()
        records.append(
            {
                "prompt_token_ids": ids[:length],
                "token_ids": ids[length:],
                "domain": ("odd", "even")[number % 2],
            }
        )
    return write_lines(path, records)
