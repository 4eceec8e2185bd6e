"""The pass `read_long_rope`: what it must leave alone."""

from __future__ import annotations

from tests.support.untouched import check_left_alone, step


def test_all_requests_have_one_rotary_table() -> None:
    check_left_alone("read_long_rope", step("decode", "read_state"))
