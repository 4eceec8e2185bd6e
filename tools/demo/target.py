"""Training of the demo target: transformers' Llama on windows of the corpus."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compilespec.training.optim import MuonAdamW

from .corpus import END_OF_TEXT, end_of_text, sample_windows

SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 448,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
BATCH, LENGTH = 16, 256
# In the decay phase some steps read longer windows, so that long outputs stay coherent.
LONG_BATCH, LONG_LENGTH, LONG_ONE_IN = 4, 1024, 3
# Share of windows from the standard library, before and in the decay phase.
STDLIB_SHARES = (0.6, 0.9)
WARMUP_STEPS, EVAL_EVERY, SAVE_EVERY = 60, 250, 100


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trapezoid schedule: linear warm-up, a flat part, linear decay to zero."""

    folder: Path  # of the checkpoint and the log
    steps: int
    decay_steps: int
    learning_rate: float
    seed: int = 0
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)

    def learning_rate_at(self, step: int) -> float:
        return self.learning_rate * min(
            1.0, (step + 1) / WARMUP_STEPS, (self.steps - step) / self.decay_steps
        )


def train_target(run: Run, splits: dict[str, Tensor], tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Train the target, or go on from the checkpoint in the run's folder; log each step there."""
    run.folder.mkdir(parents=True, exist_ok=True)
    checkpoint, log = run.folder / "target.pt", run.folder / "target.jsonl"
    model = make_target(run, tokenizer)
    optimizer = MuonAdamW(model.named_parameters(), adam_names=("embed",))
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        kept = [x for x in log.read_text().splitlines(True) if json.loads(x)["step"] < first]
        log.write_text("".join(kept))
    started = time.monotonic()
    for step in range(first, run.steps):
        loss = loss_of(model, windows_at(run, step, splits))
        loss.backward()
        norm = optimizer.step(run.learning_rate_at(step))
        record = {
            "step": step, "loss": round(float(loss.detach()), 5), "norm": round(norm, 3),
            "tokens": (step + 1) * BATCH * LENGTH, "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        last = step + 1 == run.steps
        if (step + 1) % EVAL_EVERY == 0 or last:
            record["held_out_loss"] = round(held_out_loss(model, splits), 5)
        with log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if (step + 1) % SAVE_EVERY == 0 or last:
            print(json.dumps(record), flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    return model


def make_target(run: Run, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The model before training: float32, random weights of the seed."""
    torch.manual_seed(run.seed)
    end = end_of_text(tokenizer)
    return LlamaForCausalLM(LlamaConfig(**run.sizes, bos_token_id=end, eos_token_id=end))


def windows_at(run: Run, step: int, splits: dict[str, Tensor]) -> Tensor:
    """The token ids of a step, [B, S + 1]."""
    is_decaying = step >= run.steps - run.decay_steps
    is_long = is_decaying and step % LONG_ONE_IN == 0
    return sample_windows(
        splits,
        batch=LONG_BATCH if is_long else BATCH,
        length=(LONG_LENGTH if is_long else LENGTH) + 1,
        stdlib_share=STDLIB_SHARES[is_decaying],
        seed=run.seed,
        step=step,
    )


def loss_of(model: LlamaForCausalLM, ids_BS: Tensor) -> Tensor:
    """The mean cross entropy, in nats, of all tokens but the first of each row."""
    logits_BSV = model(ids_BS[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, splits: dict[str, Tensor], *, num_windows: int = 64
) -> float:
    """The loss over evenly spaced held-out windows."""
    stream = splits["held_out"].long()
    starts = torch.linspace(0, stream.numel() - LENGTH - 1, num_windows).long()
    windows = torch.stack([stream[start : start + LENGTH + 1] for start in starts.tolist()])
    losses = [float(loss_of(model, part)) * part.shape[0] for part in windows.split(BATCH)]
    return sum(losses) / num_windows


def export_target(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights in bfloat16 and tokenizer for transformers and `compile`."""
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT, model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip
