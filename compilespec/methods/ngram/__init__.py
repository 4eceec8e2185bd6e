"""N-gram lookup: draft what followed the last earlier occurrence of the newest n-gram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.capabilities import Capabilities
from compilespec.methods.direct import DirectDrafter
from compilespec.ops.ngram_match import ngram_match
from compilespec.tracing.target_info import TargetInfo

DEFAULTS = {"max_ngram": 3, "min_ngram": 1}


class NgramDrafter(DirectDrafter):
    """The matcher, an operator of the step graph: no host work, no weights."""

    def __init__(self, *, max_ngram: int, min_ngram: int) -> None:
        super().__init__()
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def draft(self, history_BL: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
        """The K tokens after the longest window that also occurred earlier, and its length:
        `ngram_match_reference`.
        """
        return ngram_match(
            history_BL, length_B, self.num_draft_tokens, self.max_ngram, self.min_ngram
        )

    def describe(self) -> str:
        return f"n-gram lookup, windows of {self.max_ngram} to {self.min_ngram} tokens"


class NgramMethod:
    """Drafts from the request's own tokens."""

    capabilities = Capabilities(
        name="ngram",
        brings="repeats this text: edits, code, summaries",
        kind="direct",
        looks_up=True,
        aliases=("NGRAM",),
        options=tuple(DEFAULTS),
    )

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> NgramDrafter:
        """Options: `max_ngram` (3) and `min_ngram` (1), the window's longest and shortest size.

        Raises: InvalidOption.
        """
        sizes = {**DEFAULTS, **options}
        if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes.values()) or (
            not 1 <= sizes["min_ngram"] <= sizes["max_ngram"]
        ):
            raise InvalidOption(
                f"expected integers 1 <= min_ngram <= max_ngram; got min_ngram="
                f"{sizes['min_ngram']!r}, max_ngram={sizes['max_ngram']!r}"
            )
        return NgramDrafter(**sizes)


METHOD = NgramMethod()
