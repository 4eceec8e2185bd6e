"""Lookup of the longest context in a request's own tokens and in texts that ended before."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.suffix_match.reference import suffix_match_reference

__all__ = ["suffix_match", "suffix_match_reference"]


def _fake(
    history_BL: Tensor, length_B: Tensor, past_ML: Tensor, num_draft_tokens: int, *_: int
) -> tuple[Tensor, Tensor]:
    batch = history_BL.shape[0]
    return history_BL.new_empty((batch, num_draft_tokens)), history_BL.new_empty((batch,))


suffix_match = define_op(
    suffix_match_reference,
    _fake,
    has_kernel=True,
    triton="suffix_match",
)
