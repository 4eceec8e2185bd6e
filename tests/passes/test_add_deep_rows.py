"""The pass `add_deep_rows`: what it must leave alone, and a fault."""

from __future__ import annotations

import pytest
import torch

import compilespec
from compilespec.passes.splice import add_deep_rows as module
from tests.support.images import tiny_images_target
from tests.support.untouched import check_left_alone, step


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_target_without_places_for_features(phase) -> None:
    check_left_alone("add_deep_rows", step(phase, "read_state"))


def test_features_of_another_token_are_found(monkeypatch) -> None:
    right = module.with_features

    def wrong(x_1TD, index, given_T, deep_PE):
        return right(x_1TD, index, given_T, deep_PE.roll(1, 0))

    monkeypatch.setattr(module, "with_features", wrong)
    program = compilespec.trace(tiny_images_target("qwen3_vl"), max_seq_len=64, max_batch_size=4)
    report = compilespec.verify(program, passes=["add_deep_rows"], batch_sizes=[3])
    assert not report.ok


def test_the_marker_is_a_copy() -> None:
    x = torch.randn(2, 3, 4)
    torch.library.opcheck(torch.ops.compilespec.deep_rows, (x, 1))
    assert torch.equal(torch.ops.compilespec.deep_rows(x, 1), x)
