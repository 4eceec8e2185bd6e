"""Lookup of the longest context in a request's own tokens and in texts that ended before."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.suffix_match.reference import suffix_match_reference

__all__ = ["suffix_match", "suffix_match_reference"]


def suffix_match(
    history_BL: Tensor,
    length_B: Tensor,
    past_ML: Tensor,
    num_draft_tokens: int,
    max_match: int,
    min_match: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The tokens that most often followed the longest context that occurred before; see
    `suffix_match_reference`.
    """
    drafts_BK, matched_B = _SUFFIX_MATCH(
        history_BL, length_B, past_ML, num_draft_tokens, max_match, min_match, vocab_size
    )
    return drafts_BK, matched_B


def _fake(
    history_BL: Tensor, length_B: Tensor, past_ML: Tensor, num_draft_tokens: int, *_: int
) -> tuple[Tensor, Tensor]:
    batch = history_BL.shape[0]
    return history_BL.new_empty((batch, num_draft_tokens)), history_BL.new_empty((batch,))


_SUFFIX_MATCH = define_op(
    "suffix_match(Tensor history, Tensor length, Tensor past, int num_draft_tokens, "
    "int max_match, int min_match, int vocab_size) -> (Tensor drafts, Tensor matched)",
    suffix_match_reference,
    _fake,
    has_kernel=True,
)
