"""Training of a small causal LM that drafts for a large one of the same vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.tracing.target_info import TargetInfo
from compilespec.training.batches import Lesson
from compilespec.training.method import StepLosses, TrainingMethod
from compilespec.training.options import TrainOptions


class DraftModelTraining(TrainingMethod):
    """A llama of a few layers, taught by the target's probabilities.

    Args:
        num_layers: its layers.
        head_dim: width of its attention heads.
        share: its width is the target's over this, rounded down to a multiple of `head_dim`.
    """

    spec = "draft_model"

    def __init__(self, *, num_layers: int = 2, head_dim: int = 64, share: int = 4) -> None:
        self.num_layers, self.head_dim, self.share = num_layers, head_dim, share
        self._tokenizer: Any = None

    def create(self, info: TargetInfo, counts: Tensor, options: TrainOptions) -> nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig

        self._tokenizer = info.tokenizer
        num_heads = max(1, info.hidden_size // (self.share * self.head_dim))
        width = num_heads * self.head_dim
        ids = {
            name: getattr(info.config, name, None)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        config = LlamaConfig(
            vocab_size=info.vocab_size,
            hidden_size=width,
            intermediate_size=options.intermediate_size or 3 * width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            max_position_embeddings=info.max_seq_len or 4096,
            tie_word_embeddings=True,
            **ids,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model.to(info.device)

    def aux_layers(self, drafter: nn.Module) -> tuple[int, ...]:
        return ()

    def draft_ids(self, drafter: nn.Module) -> Tensor | None:
        return None

    def losses(self, drafter: nn.Module, lesson: Lesson, depth: int) -> StepLosses:
        """One loss; a place counts as right up to step j if j + 1 tokens in a row are right."""
        batch = lesson.batch
        logits_BTV = drafter(input_ids=batch.ids, use_cache=False).logits
        at_BA = (batch.origins + 1).clamp_max(batch.ids.shape[1] - 1)
        index = at_BA[..., None].expand(-1, -1, logits_BTV.shape[2])
        logits_BAV = logits_BTV.gather(1, index).float()
        probs_BAV, best_BA = lesson.judge(0)
        weight_BA = batch.weights(0)
        cost_BA = -(probs_BAV * logits_BAV.log_softmax(-1)).sum(-1)
        loss = (cost_BA * weight_BA).sum() / weight_BA.sum().clamp_min(1)
        right_BA = (logits_BAV.argmax(-1) == best_BA) * weight_BA
        return StepLosses(losses=loss[None], right=torch.stack(list(in_a_row(right_BA, depth))))

    def save(self, drafter: nn.Module, directory: Path, dtype: torch.dtype, layout: str) -> None:
        stored: Any = copy.deepcopy(drafter).to(dtype)
        stored.save_pretrained(directory)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(directory)

    def slow_parameters(self, drafter: nn.Module) -> Iterable[str]:
        return ("lm_head", "embed_tokens")


def in_a_row(right_BA: Tensor, depth: int) -> Iterable[Tensor]:
    """The share of places from which 1, 2, ... `depth` tokens in a row are right."""
    for step in range(depth):
        count = right_BA.shape[1] - step
        if count < 1:
            yield torch.zeros((), device=right_BA.device)
        else:
            yield torch.stack([right_BA[:, i : i + count] for i in range(step + 1)]).prod(0).mean()
