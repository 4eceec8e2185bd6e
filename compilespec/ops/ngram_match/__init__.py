"""N-gram lookup in the tokens of each request."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.ngram_match.reference import ngram_match_reference

__all__ = ["ngram_match", "ngram_match_reference"]


def _fake(
    history_BL: Tensor, length_B: Tensor, num_draft_tokens: int, max_ngram: int, min_ngram: int
) -> tuple[Tensor, Tensor]:
    batch = history_BL.shape[0]
    return history_BL.new_empty((batch, num_draft_tokens)), history_BL.new_empty((batch,))


ngram_match = define_op(
    ngram_match_reference,
    _fake,
    has_kernel=True,
    triton="ngram_match",
)
