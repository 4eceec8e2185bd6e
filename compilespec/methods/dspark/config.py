"""One DSpark drafter: a DFlash drafter's config and what its two heads add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compilespec.methods.dflash.config import DFlashConfig

MarkovType = Literal["vanilla", "gated", "rnn"]


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
