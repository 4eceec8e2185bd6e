"""The facts of a target that a drafter may use, read from the target's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.errors import TraceError
from compilespec.program import Traced, markers
from compilespec.tracing.load import Target, text_config
from compilespec.tracing.structure import (
    EMBEDDING,
    find_embedding,
    find_head,
    id_readers,
    num_decoder_layers,
    shape_of,
)
from compilespec.tracing.target_check import check_alone, check_logits, check_positions


def describe_target(traced: Traced, target: Target) -> TargetInfo:
    """Widths, vocabulary, embedding and head of a captured causal LM.

    Raises: UnsupportedModel if not every token has logits over the vocabulary, or tokens are mixed
    outside attention; TraceError if the graph's output is not a product with a head, or its ids
    enter no embedding.
    """
    check_logits(traced, target.model)
    output = next(node for node in reversed(traced.graph_module.graph.nodes) if node.op == "output")
    logits = output.args[0][0]
    head = find_head(logits)
    ids = next(
        node for node in traced.graph_module.graph.nodes if node.meta.get("role") == "input_ids"
    )
    embedding = find_embedding(ids)
    vocab_size = (shape_of(logits) or (None,))[-1]
    if vocab_size is None or head is None or embedding is None:
        raise TraceError(
            f"{type(target.model).__name__}: expected token ids that enter an embedding and logits "
            f"that are a product with a head; found embedding {embedding}, head {head}"
        )
    check_positions(traced, target.model)
    check_alone(traced, target.model)
    hidden_size = (shape_of(head.hidden) or (0,))[-1]
    parameter = next(target.model.parameters())
    return TargetInfo(
        hidden_size=int(hidden_size or 0),
        vocab_size=int(vocab_size),
        num_layers=num_decoder_layers(traced.graph_module.graph),
        dtype=parameter.dtype,
        device=parameter.device,
        embedding=_weight(traced, embedding),
        lm_head=_weight(traced, head.weight),
        config=text_config(target.model),
        tokenizer=target.tokenizer,
        max_seq_len=target.max_seq_len or 0,
        kv_layers=_kv_layers(traced),
        has_kept_masks=traced.has_kept_masks,
        takes_rows=[node.target in EMBEDDING for node in id_readers(ids)] == [True],
        traced=traced,
    )


def _kv_layers(traced: Traced) -> tuple[KVLayer, ...]:
    """Sizes of each layer's keys and values; layers may share an earlier layer's."""
    layers: list[KVLayer] = []
    producers: dict[object, int] = {}
    for index, marker in enumerate(markers(traced.graph_module)):
        (_, num_heads, _, key_dim), (*_, value_dim) = (
            shape_of(marker.args[half]) or (0, 0, 0, 0) for half in (1, 2)
        )
        layers.append(
            KVLayer(
                num_heads=int(num_heads or 0),
                key_dim=int(key_dim or 0),
                value_dim=int(value_dim or 0),
                window=int(str(marker.args[4])),
                producer=producers.setdefault(marker.args[1], index),
            )
        )
    return tuple(layers)


def _weight(traced: Traced, node: fx.Node) -> Tensor:
    name = node.meta.get("role")
    tensor = traced.weights.get(str(name))
    if tensor is None:
        raise TraceError(
            f"{node.name}: expected an embedding or head that is a parameter of the model, found "
            f"{name}"
        )
    return torch.Tensor.detach(tensor)


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """Sizes of one attention layer's cache in the target."""

    num_heads: int
    key_dim: int
    value_dim: int
    window: int  # keys that a query of the target sees, 0 for all
    producer: int  # the layer whose keys and values these are: itself, or an earlier one


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """The facts that a drafter may need about its target."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor  # [V, D] input embedding weight, shared by identity
    lm_head: (
        Tensor  # [V, D] output head weight, shared by identity (the embedding itself when tied)
    )
    config: Any = None  # transformers config of the language model, when the target has one
    tokenizer: Any = None  # transformers tokenizer, when one is known
    max_seq_len: int = 0
    kv_layers: tuple[KVLayer, ...] = ()  # by layer
    has_kept_masks: bool = False  # true: masks are computed from what the cache holds
    takes_rows: bool = True  # true: ids enter one embedding alone, whose rows can be given
    traced: Traced | None = None  # its graph, where it was traced
