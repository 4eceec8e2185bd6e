"""A head with random weights for any target: for tests and first experiments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.methods.decoder_body import BODIES
from compilespec.methods.eagle3.config import Eagle3Config
from compilespec.methods.eagle3.drafter import Eagle3Drafter
from compilespec.methods.eagle3.load import check_sizes
from compilespec.methods.parts.d2t import random_d2t
from compilespec.methods.parts.random import random_tensor, spread_aux_layers
from compilespec.methods.parts.weights import fill, place
from compilespec.ops.device import traits_of
from compilespec.tracing.target_info import TargetInfo


def random_head(
    target: TargetInfo,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    body: str = "llama",
    **fields: Any,
) -> Eagle3Drafter:
    """Build a random head that fits `target`, in its dtype, on its device.

    Hardly any of its drafts are accepted, but it is a complete head: norm weights differ from 1,
    biases from 0, and its draft vocabulary is a random ascending choice of target ids.

    Args:
        target: sizes; its embedding is shared unless `own_embedding=True`.
        draft_vocab_size: reduced vocabulary; None for the target's whole one, without d2t.
        seed: seed of the weights and of the choice of ids.
        body: decoder layer class.
        fields: any other field of `Eagle3Config`.
    Raises:
        InvalidOption: an unknown field, or an invalid vocabulary or body.
        DraftMismatch: fields that contradict the target.
    """
    rows = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    with torch.device("meta"):
        drafter = Eagle3Drafter(random_config(target, rows, body, fields))
    fill_randomly(drafter, target, seed)
    return drafter


def fill_randomly(drafter: Eagle3Drafter, target: TargetInfo, seed: int) -> None:
    """Give a drafter on the meta device random tensors, and those that it shares with the target.

    Raises: DraftMismatch.
    """
    config = drafter.config
    check_sizes(config, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: like
        if traits_of(target.device).is_meta
        else random_tensor(name, like.shape, generator)
        for name, like in sorted(drafter.state_dict().items())
        if name != "d2t"
    }
    if config.has_d2t:
        tensors["d2t"] = random_d2t(config.draft_vocab_size, target.vocab_size, generator)
    place(tensors, target)
    shared: dict[str, Tensor] = {}
    if not config.own_embedding:
        shared["embed_tokens.weight"] = target.embedding
    if not config.own_lm_head:
        shared["lm_head.weight"] = target.lm_head
    fill(drafter, tensors, shared, source="random head", device=target.device)


def random_config(target: TargetInfo, rows: int, body: str, fields: dict[str, Any]) -> Eagle3Config:
    """Sizes that fit the target; `fields` replace the defaults.  Raises: InvalidOption."""
    if body not in BODIES:
        raise not_one_of("random_head: body", body, BODIES)
    if not 1 <= rows <= target.vocab_size:
        raise InvalidOption(
            f"random_head: draft_vocab_size must be 1..{target.vocab_size}, got {rows}"
        )
    width = int(fields.get("hidden_size", target.hidden_size))
    head_dim = next(
        (size for size in (128, 64, 32, 16, 8) if width % size == 0 and width // size >= 4), width
    )
    head_dim = int(fields.get("head_dim", head_dim))
    num_heads = int(fields.get("num_heads", max(1, width // head_dim)))
    defaults: dict[str, Any] = {
        "layout": "safeailab",
        "hidden_size": width,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": 2 * width,
        "num_layers": 1,
        "num_heads": num_heads,
        "num_kv_heads": num_heads // 2 if num_heads % 2 == 0 else num_heads,
        "head_dim": head_dim,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_seq_len or 4096,
        "rope": (("rope_theta", 10000.0), ("rope_type", "default")),
        "qkv_bias": body == "qwen2",
        "own_embedding": width != target.hidden_size,
        "has_d2t": rows != target.vocab_size,
        "aux_layers": spread_aux_layers(target.num_layers),
        "aux_source": "random_head",
    }
    try:
        return Eagle3Config(**{**defaults, "body": body, "draft_vocab_size": rows, **fields})
    except TypeError as error:
        raise InvalidOption(f"random_head: {error}") from None
