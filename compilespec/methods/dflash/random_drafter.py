"""A DFlash drafter with random weights for any target: for tests and first experiments."""

from __future__ import annotations

from typing import Any

import torch

from compilespec.errors import InvalidOption
from compilespec.methods.dflash.config import DFlashConfig
from compilespec.methods.dflash.drafter import DFlashDrafter
from compilespec.methods.dflash.load import fill_drafter
from compilespec.methods.parts.d2t import random_d2t
from compilespec.methods.parts.random import random_tensor, spread_aux_layers
from compilespec.ops.device import traits_of
from compilespec.tracing.target_info import TargetInfo


def random_drafter(
    target: TargetInfo, *, draft_vocab_size: int | None = None, seed: int = 0, **fields: Any
) -> DFlashDrafter:
    """Build a random drafter that fits `target`, in its dtype, on its device.

    Args:
        draft_vocab_size: reduced vocabulary; None for the target's whole one, and its head.
        seed: seed of the weights and of the choice of ids.
        fields: any other field of `DFlashConfig`.
    Raises: InvalidOption (an unknown field), DraftMismatch (fields that contradict the target).
    """
    config = random_config(target, draft_vocab_size, fields)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    fill_randomly(drafter, target, seed)
    return drafter


def random_config(
    target: TargetInfo, draft_vocab_size: int | None, fields: dict[str, Any]
) -> DFlashConfig:
    """Sizes that fit the target; `fields` replace the defaults.  Raises: InvalidOption."""
    rows = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    if not 1 <= rows <= target.vocab_size:
        raise InvalidOption(
            f"random_drafter: draft_vocab_size must be 1..{target.vocab_size}, got {rows}"
        )
    width, num_layers = target.hidden_size, int(fields.get("num_layers", 2))
    block_size = int(fields.get("block_size", 8))
    is_reduced = rows != target.vocab_size
    defaults: dict[str, Any] = {
        "layout": "speculators",
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": 2 * width,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": max(8, width // 4 // 2 * 2),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": rows,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_seq_len or 4096,
        "rope": (("rope_theta", 10000.0), ("rope_type", "default")),
        "windows": (0,) * num_layers,
        "own_lm_head": is_reduced,
        "has_d2t": is_reduced,
        "aux_layers": spread_aux_layers(target.num_layers),
        "aux_source": "random_drafter",
        "block_size": block_size,
        "mask_token_id": 0,
        "num_draft_tokens": block_size - (not fields.get("sample_from_anchor")),
    }
    try:
        return DFlashConfig(**{**defaults, **fields})
    except TypeError as error:
        raise InvalidOption(f"random_drafter: {error}") from None


def fill_randomly(drafter: DFlashDrafter, target: TargetInfo, seed: int) -> None:
    """Give a drafter on the meta device random tensors, and those that it shares with the target.

    Raises: DraftMismatch.
    """
    config, generator = drafter.config, torch.Generator().manual_seed(seed)
    lent = {"embed_tokens.weight": config.own_embedding, "lm_head.weight": config.own_lm_head}
    tensors = {
        name: like
        if traits_of(target.device).is_meta
        else random_tensor(name, like.shape, generator)
        for name, like in sorted(drafter.state_dict().items())
        if name != "d2t" and lent.get(name, True)
    }
    if config.has_d2t:
        tensors["d2t"] = random_d2t(config.draft_vocab_size, target.vocab_size, generator)
    fill_drafter(drafter, tensors, target, source="random drafter")
