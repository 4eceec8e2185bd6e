"""One DSpark drafter: a DFlash drafter's config and what its two heads add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compilespec.errors import CheckpointError, NotSupported
from compilespec.methods.dflash.config import DFlashConfig, first_given, normalise

MarkovType = Literal["vanilla", "gated", "rnn"]
MARKOV_TYPES = ("vanilla", "gated", "rnn")
_W1, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """One DSpark drafter, in any checkpoint format."""

    markov_rank: int
    """Width of the embedding of the token before; 0 for no Markov head."""
    markov_type: MarkovType = "vanilla"
    """What the bias of a draft's logits depends on: the token before alone, the row's hidden state
    as well, or a state that runs along the block."""
    has_confidence: bool = False
    """A head predicts whether a draft is accepted."""
    confidence_with_markov: bool = True
    """That head takes the embedding of the token before, too."""

    def describe(self) -> str:
        """The resolved spec on one line."""
        block = super().describe().removeprefix("dflash ")
        markov = f"{self.markov_type} of rank {self.markov_rank}" if self.markov_rank else "none"
        confidence = ", confidence head" * self.has_confidence
        return f"dspark {block}, Markov head {markov}{confidence}"


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
