"""The pass `report_evidence`: what it must leave alone."""

from __future__ import annotations

import dataclasses

from tests.support.hand_graphs import HAND_CONFIG
from tests.support.untouched import check_left_alone, step


def test_without_a_drafter_nothing_changes() -> None:
    config = dataclasses.replace(HAND_CONFIG, num_draft_tokens=0)
    done = ("read_state", "insert_paged_attention", "splice_acceptance")
    check_left_alone("report_evidence", step("decode", *done, config=config))
