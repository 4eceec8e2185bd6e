"""Suffix lookup: draft what most often followed the longest context that occurred before, in the
request's own tokens or in those of requests that ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.direct import DirectDrafter
from compilespec.ops.suffix_match import suffix_match, suffix_match_reference
from compilespec.tracing.target_info import TargetInfo

DEFAULTS = {"max_match": 16, "min_match": 1, "num_past_texts": 16}


class SuffixDrafter(DirectDrafter):
    """The search, as one operator in the step graph: no weights, no host work in the step."""

    def __init__(
        self, *, max_match: int, min_match: int, num_past_texts: int, vocab_size: int
    ) -> None:
        super().__init__()
        self.max_match, self.min_match = max_match, min_match
        self.num_past_texts, self.vocab_size = num_past_texts, vocab_size

    def draft(self, history_BL: Tensor, length_B: Tensor, past_ML: Tensor) -> tuple[Tensor, Tensor]:
        """The K tokens that the places with the longest match vote for, and the match's length:
        `suffix_match_reference`.

        The CPU has a kernel for it; on a GPU it is tensor code, which is compiled with the step.
        """
        match = suffix_match_reference if history_BL.is_cuda else suffix_match
        return match(
            history_BL, length_B, past_ML, self.num_draft_tokens, self.max_match, self.min_match,
            self.vocab_size,
        )  # fmt: skip

    def describe(self) -> str:
        return (
            f"suffix lookup, matches of {self.min_match} to {self.max_match} tokens, "
            f"{self.num_past_texts} past texts"
        )


class SuffixMethod:
    """Drafts from the request's own tokens and from past requests."""

    capabilities = Capabilities(
        name="suffix",
        brings="repeats this text and earlier outputs: edits, code, agents, summaries",
        kind="direct",
        looks_up=True,
        remembers_texts=True,
        options=tuple(DEFAULTS),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> SuffixDrafter:
        """Options: `max_match` (16) and `min_match` (1), how many tokens of context are compared
        and how many must be equal; `num_past_texts` (16), how many ended requests are remembered.

        Raises: InvalidOption.
        """
        sizes = {**DEFAULTS, **options}
        if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes.values()) or (
            not 1 <= sizes["min_match"] <= sizes["max_match"] or sizes["num_past_texts"] < 1
        ):
            raise InvalidOption(
                "expected integers 1 <= min_match <= max_match and num_past_texts >= 1; got "
                + ", ".join(f"{name}={size!r}" for name, size in sizes.items())
            )
        return SuffixDrafter(**sizes, vocab_size=target.vocab_size)


METHOD = SuffixMethod()
