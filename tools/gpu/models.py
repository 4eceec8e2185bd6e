"""Random models at real sizes, and at sizes that a CPU runs in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a target with an EAGLE-3 head of the same width."""

    family: str
    config: Mapping[str, Any]
    num_draft_tokens: int
    batches: tuple[int, ...]
    num_accepted: int
    """Drafts that are accepted by force: the head is random."""
    context: int
    """Prompt tokens of every request."""


_LENGTH = {"max_position_embeddings": 4096}
SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(
        family="llama",
        config={
            "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 128256, **_LENGTH,
        },
        num_draft_tokens=5, batches=(1, 8, 64), num_accepted=2, context=512,
    ),
    "moe": Shape(
        family="qwen3_moe",
        config={
            "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "vocab_size": 151936, **_LENGTH,
        },
        num_draft_tokens=3, batches=(1, 8, 64), num_accepted=2, context=512,
    ),
}  # fmt: skip

_TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
         "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 67,
         "max_position_embeddings": 96}  # fmt: skip
TINY_SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(
        family="llama", config=_TINY, num_draft_tokens=2, batches=(1, 3), num_accepted=2, context=7
    ),
    "moe": Shape(
        family="qwen3_moe",
        config={**_TINY, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        num_draft_tokens=1, batches=(2,), num_accepted=1, context=7,
    ),
}  # fmt: skip


def make_target(shape: Shape, dtype: torch.dtype, device: torch.device) -> Any:
    """A seeded random model, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.family, **shape.config)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def num_bytes_read(weights: Mapping[str, torch.Tensor], model: Any) -> int:
    """Bytes of weights that a step reads: all but an untied input embedding, of which it reads only
    a few rows.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    seen = {w.data_ptr(): w.numel() * w.element_size() for w in weights.values()}
    if embedding.data_ptr() != head.data_ptr():
        seen.pop(embedding.data_ptr(), None)
    return sum(seen.values())


def make_head(model: Any) -> Any:
    """A random EAGLE-3 head that shares the model's embedding and output head."""
    from compilespec.methods.eagle3 import random_head
    from compilespec.tracing.target_info import TargetInfo

    target = TargetInfo(
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_hidden_layers,
        dtype=model.dtype,
        device=model.device,
        embedding=model.get_input_embeddings().weight,
        lm_head=model.get_output_embeddings().weight,
        config=model.config,
        max_seq_len=model.config.max_position_embeddings,
    )
    return random_head(target)
