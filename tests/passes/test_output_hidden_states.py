"""The pass `output_hidden_states`: what it must leave alone."""

from __future__ import annotations

from tests.support.untouched import check_left_alone, step


def test_without_acceptance_there_is_no_output() -> None:
    check_left_alone("output_hidden_states", step("decode", "read_state", "insert_paged_attention"))
