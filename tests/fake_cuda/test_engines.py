"""One engine of each kind on the fake device: every bucket captured, every token the CPU's."""

from __future__ import annotations

import pytest

from tests.support.fake_cuda import SIZES, Case, compare

pytestmark = pytest.mark.fake_cuda

CASES = [
    *(Case(family="llama", spec=spec)
      for spec in ("none", "ngram", "eagle3", "mtp", "tree", "suffix+eagle3")),
    Case(family="qwen3_moe"),  # experts in one grouped product
    Case(family="gpt_oss"),  # windows and sinks
    Case(family="qwen3_5"),  # recurrent layers
    Case(family="deepseek_v3"),  # latents
    Case(family="llama", spec="eagle3", device="cuda:1"),
    Case(family="llama", spec="eagle3", is_lazy=True),
]  # fmt: skip


def name_of(case: Case) -> str:
    return f"{case.family}-{case.spec}-{case.device}{'-lazy' if case.is_lazy else ''}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_the_cpus_and_every_bucket_is_captured(case: Case) -> None:
    record = compare(case)
    assert record["faults"] == []
    assert record["kinds"] == ["decode full", "prefill piecewise"]
    assert record["refused"] == {}
    assert record["uncaptured"] == 0
    assert record["buckets"] >= 2 * SIZES["max_batch_size"]
    assert record["replays"] > 20
