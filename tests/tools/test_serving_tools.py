"""What measures the server from outside: lm-eval, guidellm and aiperf, and what HTTP costs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.bench import report, serving
from tools.bench.__main__ import main
from tools.serving import evals, loads


def test_the_committed_scores_are_equal() -> None:
    file = Path(report.__file__).with_name("results") / "lm-eval.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["differences"] == []
    assert found["largest_difference"] <= evals.TOLERANCE
    assert found["ways"]["none"] == found["ways"]["eagle3"]


def test_lm_eval_scores_are_those_of_its_own_backend_and_of_no_speculation() -> None:
    pytest.importorskip("lm_eval")
    options = argparse.Namespace(
        model="demo", spec="eagle3", backend="eager", num_prompts=3, window=96, concurrent=4
    )
    found = evals.compare(options)
    assert found["differences"] == []
    assert found["largest_difference"] <= evals.TOLERANCE
    assert all(way["scores"]["documents"] > 1 for way in found["ways"].values())


@pytest.mark.parametrize("tool", ["guidellm", "aiperf"])
def test_load_tools_find_every_request_answered(tool: str) -> None:
    if importlib.util.find_spec(tool) is None or shutil.which(
        tool, path=str(Path(sys.executable).parent)
    ) is None:  # fmt: skip
        pytest.skip(f"needs {tool}")
    options = argparse.Namespace(
        model="demo", spec="eagle3", backend="eager", requests=6, concurrency=3, tools=[tool]
    )
    found = loads.measure(options)["tools"][tool]
    assert found["num_requests"] == 6
    assert found["output_tokens_per_s"] > 0
    assert found["first_token_ms"] > 0
    if tool == "aiperf":
        assert found["accepted_drafts"] > 0 < found["rejected_drafts"]


def test_what_http_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(serving, "MAX_LOSS", 1.0)
    monkeypatch.setattr(report.write_json, "__defaults__", (tmp_path,))
    options = ["--backend", "eager", "--num-prompts", "2", "--max-new-tokens", "8", "--rounds", "1"]
    assert main(["--serving", *options, "--only", "none", "--batch", "2"]) == 0
    found: Any = json.loads((tmp_path / "serving.json").read_text())
    ways = found["specs"]["none"]["ways"]
    assert set(ways) == {"engine", "whole", "streams"}
    assert ways["streams"]["tokens_per_s"]["p50"] > 0
