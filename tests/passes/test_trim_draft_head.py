"""The pass `trim_draft_head`: what it must leave alone."""

from __future__ import annotations

import torch

from tests.support.untouched import check_left_alone, step


def test_the_targets_own_head_is_refused() -> None:
    """Its product and its argmax are no proposal of a drafter."""
    done = ("read_state", "insert_paged_attention", "splice_acceptance")
    case = step("decode", *done, draft_ids=torch.arange(5))
    check_left_alone("trim_draft_head", case, is_refused=True)
