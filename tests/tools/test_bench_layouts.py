"""The benchmark of weight layouts checks what it times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tools.bench import layouts


def test_every_layout_is_measured(monkeypatch):
    monkeypatch.setattr(layouts, "ROWS", (1, 7))
    results = layouts.measure((48, 256), 1, 1 << 16)
    names = {row["layout"] for row in results}
    assert {layouts.BASE, "int8 bytes", "int8 dynamic quads", "int4 int4", "int4 bytes"} <= names
    assert len(results) == 2 * len(names)
    assert all(row["us"] > 0 and row["ratio_to_bf16"] > 0 for row in results)


def test_a_wrong_product_is_not_timed():
    way = next(layouts.ways((48, 256), 1))
    x = torch.randn(3, 256).bfloat16()
    layouts.check(way, x)
    with pytest.raises(AssertionError, match="bfloat16 panels: off by"):
        layouts.check(dataclasses.replace(way, weight=way.weight.flip(0)), x)
