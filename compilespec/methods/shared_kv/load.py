"""From a checkpoint directory, a module or nothing to a query-only drafter that fits its target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import DraftMismatch, InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.methods.base import Drafter
from compilespec.methods.checkpoint import load_strict, read_config, read_tensors
from compilespec.methods.shared_kv.config import (
    QUERY_POSITIONS,
    AssistantConfig,
    find_layer,
)
from compilespec.methods.shared_kv.drafter import AssistantDrafter, SharedKVDrafter
from compilespec.methods.shared_kv.layout import read_assistant_config
from compilespec.tracing.target_info import TargetInfo

logger = logging.getLogger(__name__)

DEFAULT_ROPE = (("rope_theta", 10000.0), ("rope_type", "default"))


def load_drafter(
    draft: str | Path | nn.Module, target: TargetInfo, options: Mapping[str, Any]
) -> Drafter:
    """Build the drafter from a checkpoint, or adopt a `SharedKVDrafter`; checked on the target.

    Raises: CheckpointError, DraftMismatch, InvalidOption, NotSupported.
    """
    if isinstance(draft, SharedKVDrafter):
        if options:
            raise InvalidOption("query_position: only for checkpoints, got a drafter module")
        _check_module(draft, target)
        return draft
    if not isinstance(draft, str | Path):
        raise InvalidOption(
            f"draft: expected a directory or a SharedKVDrafter, got {type(draft).__name__}"
        )
    raw, tensors = read_config(draft), read_tensors(draft)
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("model.embed_tokens.weight")
    if head is not None and (embedding is None or not torch.equal(head, embedding)):
        tensors["lm_head.weight"] = head  # not the tied one: reported as unexpected
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = read_assistant_config(raw, shapes, target, **options)
    drafter = _build(config, tensors, target, str(draft))
    logger.info("%s: %s", draft, drafter.describe())
    return drafter


def random_drafter(
    target: TargetInfo,
    *,
    seed: int = 0,
    hidden_size: int = 32,
    num_centroids: int = 0,
    centroid_top_k: int = 0,
    query_position: str = "bonus",
    layer_types: tuple[str, ...] | None = None,
) -> AssistantDrafter:
    """Build a random assistant that fits `target`, in its dtype: for tests and first experiments.

    Args:
        target: its `kv_layers` say which caches can be read.
        layer_types: types of the drafter's layers; None takes one of each type that the target has.
        num_centroids, centroid_top_k: sizes of an ordered head; 0 for a plain head.
    Raises:
        DraftMismatch: the target has no layer of such a type.
        InvalidOption: an unknown query position, or clusters that do not divide the vocabulary.
    """
    if query_position not in QUERY_POSITIONS:
        raise not_one_of("query_position", query_position, QUERY_POSITIONS)
    if num_centroids and target.vocab_size % num_centroids:
        raise InvalidOption(
            f"num_centroids must divide the vocabulary of {target.vocab_size}; got {num_centroids}"
        )
    if layer_types is None:
        layer_types = tuple(
            layer_type
            for layer_type, is_sliding in (("sliding_attention", True), ("full_attention", False))
            if any(bool(layer.window) == is_sliding for layer in target.kv_layers)
        )
    group = 2 * max(layer.num_heads for layer in target.kv_layers)
    layers = []
    for layer_type in layer_types:
        is_sliding = layer_type == "sliding_attention"
        alike = [one for one in target.kv_layers if bool(one.window) == is_sliding]
        layers.append(
            find_layer(
                target, layer_type, head_dim=alike[-1].key_dim if alike else 0,
                window=alike[-1].window if alike else 0, rope=DEFAULT_ROPE, num_heads=group,
            )
        )  # fmt: skip
    config = AssistantConfig(
        hidden_size=hidden_size,
        backbone_hidden_size=target.hidden_size,
        intermediate_size=2 * hidden_size,
        num_heads=group,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        hidden_act="gelu_pytorch_tanh",
        layers=tuple(layers),
        query_position="bonus" if query_position == "bonus" else "last_written",
        num_centroids=num_centroids,
        centroid_top_k=centroid_top_k,
    )
    with torch.device("meta"):
        names = AssistantDrafter(config).state_dict()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random_tensor(name, like, generator)
        for name, like in sorted(names.items())
        if name != "target_embedding.weight"
    }
    return _build(config, tensors, target, "random drafter")


def _random_tensor(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    if name.endswith("token_ordering"):
        return torch.randperm(like.shape[0], generator=generator)
    noise = torch.randn(like.shape, generator=generator)
    return 1 + 0.1 * noise if like.dim() == 1 else noise * like.shape[-1] ** -0.5


def _check_module(drafter: SharedKVDrafter, target: TargetInfo) -> None:
    layers, known = tuple(getattr(drafter, "kv_layers", ())), len(target.kv_layers)
    if not layers or any(not 0 <= layer < known for layer in layers):
        raise DraftMismatch(
            f"{type(drafter).__name__}.kv_layers: expected target layers from 0 to {known - 1}, "
            f"got {list(layers)}"
        )


def _build(
    config: AssistantConfig, tensors: Mapping[str, Tensor], target: TargetInfo, source: str
) -> AssistantDrafter:
    """The module with its own tensors, and the target's embedding by identity."""
    if (config.backbone_hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise DraftMismatch(
            f"the draft is made for hidden states of width {config.backbone_hidden_size} and "
            f"{config.vocab_size} ids, the target has {target.hidden_size} and "
            f"{target.vocab_size}: this is the draft of another target"
        )
    placed = {
        name: tensor.to(
            device=target.device, dtype=target.dtype if tensor.is_floating_point() else torch.int64
        )
        for name, tensor in tensors.items()
    }
    with torch.device("meta"):
        drafter = AssistantDrafter(config)
    shared = target.embedding
    load_strict(drafter, {**placed, "target_embedding.weight": shared.detach()}, source=source)
    drafter.requires_grad_(False).eval()
    for layer in drafter.model.layers:
        layer.self_attn.to(target.device)
    drafter.target_embedding.share(shared)
    return drafter
