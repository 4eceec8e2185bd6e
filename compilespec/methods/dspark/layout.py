"""The layout of a DSpark checkpoint: DFlash's, and what the two heads add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.dflash.config import normalise
from compilespec.methods.dflash.layout import first_given
from compilespec.methods.dspark.config import DSparkConfig

MARKOV_TYPES = ("vanilla", "gated", "rnn")
_W1, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


def normalise_dspark(
    raw: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    vocab_size: int,
    num_target_layers: int,
    *,
    aux_layers: Sequence[int] | None = None,
) -> DSparkConfig:
    """Read config.json and the tensors' names and shapes into one `DSparkConfig`.

    Args: those of `dflash.config.normalise`.
    Raises: CheckpointError, NotSupported, DraftMismatch, InvalidOption.
    """
    block = normalise(
        raw, shapes, vocab_size, num_target_layers, aux_layers=aux_layers, kind="dspark"
    )
    places = (raw, raw.get("dspark_config") or {}, raw.get("dflash_config") or {})
    rank = first_given(places, "markov_rank", shapes[_W1][1] if _W1 in shapes else 0)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise CheckpointError(
            f"config.json of the draft: markov_rank must be an integer of 0 or more, got {rank!r}"
        )
    kind = first_given(places, "markov_head_type", "vanilla")
    if kind not in MARKOV_TYPES:
        raise NotSupported(
            f"markov_head_type {kind!r} is not built; built: {', '.join(MARKOV_TYPES)}"
        )
    has_confidence = bool(first_given(places, "enable_confidence_head", _CONFIDENCE in shapes))
    with_markov = bool(first_given(places, "confidence_head_with_markov", rank > 0))
    if has_confidence and with_markov and not rank:
        raise CheckpointError(
            "config.json of the draft: confidence_head_with_markov needs a Markov head, and "
            "markov_rank is 0; set one of them to what the tensors say"
        )
    return DSparkConfig(
        **vars(block),
        markov_rank=rank,
        markov_type=kind,
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
    )
