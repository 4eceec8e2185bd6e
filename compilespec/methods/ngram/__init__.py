"""N-gram lookup: draft what followed the last time that the newest tokens stood in the request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import InvalidOption
from compilespec.methods.base import Capabilities, TargetInfo
from compilespec.methods.direct import DirectDrafter
from compilespec.program import PAD

DEFAULTS = {"max_ngram": 3, "min_ngram": 1}


class NgramDrafter(DirectDrafter):
    """The matcher, as tensor code in the step graph: no host work, no weights."""

    def __init__(self, *, max_ngram: int, min_ngram: int) -> None:
        super().__init__()
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def draft(self, history_BL: Tensor, length_B: Tensor) -> Tensor:
        """The longest window of newest tokens (max_ngram .. min_ngram) that also stood earlier, at
        its most recent place; the K tokens after it, PAD past the newest token or without a match.

        Column e of `matched` counts the tokens before e that equal the newest ones, backwards.
        """
        width = history_BL.shape[1]
        column_L = torch.arange(width, device=history_BL.device)
        length_B1 = length_B.long().unsqueeze(1)
        matched_BL = torch.zeros_like(history_BL)
        is_equal_BL = column_L < length_B1
        for back in range(1, self.max_ngram + 1):
            newest_B1 = history_BL.gather(1, (length_B1 - back).clamp(min=0))
            before_BL = nn.functional.pad(history_BL, (back, 0), value=PAD)[:, :width]
            is_equal_BL = is_equal_BL & (before_BL == newest_B1) & (before_BL >= 0)
            is_equal_BL = is_equal_BL & (length_B1 >= back)
            matched_BL = matched_BL + is_equal_BL
        score_BL = matched_BL * (width + 1) + column_L
        end_B1 = score_BL.argmax(1, keepdim=True)
        is_found_B1 = matched_BL.gather(1, end_B1) >= self.min_ngram
        wanted_BK = end_B1 + torch.arange(self.num_draft_tokens, device=history_BL.device)
        drafts_BK = history_BL.gather(1, wanted_BK.clamp(max=width - 1))
        return torch.where(is_found_B1 & (wanted_BK < length_B1), drafts_BK, PAD)

    def describe(self) -> str:
        return f"n-gram lookup, windows of {self.max_ngram} to {self.min_ngram} tokens"


class NgramMethod:
    """Drafts from the request's own tokens."""

    capabilities = Capabilities(name="ngram", kind="direct", aliases=("NGRAM",))

    def load(
        self, draft: str | Path | nn.Module | None, target: TargetInfo, options: Mapping[str, Any]
    ) -> NgramDrafter:
        """Options: `max_ngram` (3) and `min_ngram` (1), the window's longest and shortest size.

        Raises: InvalidOption.
        """
        unknown = sorted(options.keys() - DEFAULTS.keys())
        if unknown:
            raise InvalidOption(
                f"unknown option {', '.join(unknown)}; method 'ngram' knows {', '.join(DEFAULTS)}"
            )
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
