"""What the committed matrix says of engines on the fake device (`make fake-cuda-matrix`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.drafters import METHODS
from tools.bench.report import RESULTS_DIR
from tools.fake_cuda.matrix import PARTS, RESULT, faults_of

RECORDED: dict[str, Any] = json.loads((RESULTS_DIR / f"{RESULT}.json").read_text())["parts"]


@pytest.mark.parametrize("name", RECORDED)
def test_engines_have_the_cpus_tokens_and_a_graph_for_every_bucket(name: str) -> None:
    assert name in PARTS
    assert faults_of(RECORDED[name]) == []
    for record in RECORDED[name]["records"]:
        assert record["kinds"] == ["decode full", "prefill piecewise"]
        assert record["refused"] == {}
        assert record["uncaptured"] == 0
        assert record["replays"] > 20


def test_every_method_and_kind_of_model_is_recorded() -> None:
    methods = {record["spec"] for record in RECORDED["llama"]["records"]}
    assert methods == {"none", *METHODS, "tree", "suffix+eagle3"}
    assert {"qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5"} <= set(RECORDED)
