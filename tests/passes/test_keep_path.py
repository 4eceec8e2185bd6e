"""The pass `keep_path`: what it must leave alone."""

from __future__ import annotations

from tests.support.untouched import check_left_alone, step


def test_drafts_in_a_chain_are_left_alone() -> None:
    check_left_alone("keep_path", step("decode", "read_state"))
