"""The pass `add_deep_rows`: what it must leave alone, and its marker."""

from __future__ import annotations

import pytest
import torch

from tests.support.untouched import check_left_alone, step


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_target_without_places_for_features(phase) -> None:
    check_left_alone("add_deep_rows", step(phase, "read_state"))


def test_the_marker_is_a_copy() -> None:
    x = torch.randn(2, 3, 4)
    torch.library.opcheck(torch.ops.compilespec.deep_rows, (x, 1))
    assert torch.equal(torch.ops.compilespec.deep_rows(x, 1), x)
