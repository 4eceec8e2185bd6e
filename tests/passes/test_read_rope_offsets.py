"""The pass `read_rope_offsets`: what it must leave alone."""

from __future__ import annotations

from tests.support.untouched import check_left_alone, step


def test_no_token_has_rotary_positions_of_its_own() -> None:
    check_left_alone("read_rope_offsets", step("decode"))
