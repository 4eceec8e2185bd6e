"""The pass `output_head_input`: what it must leave alone."""

from __future__ import annotations

from tests.support.untouched import check_left_alone, step


def test_without_acceptance_there_is_no_output() -> None:
    check_left_alone("output_head_input", step("decode", "read_state", "insert_paged_attention"))
