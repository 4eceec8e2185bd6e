"""`tools.gpu_check --smoke` runs all that the real check runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import gpu_check
from tools.gpu.models import SHAPES, SMOKE_SHAPES


def test_smoke_runs_the_whole_path(tmp_path: Path) -> None:
    assert gpu_check.main(["--smoke", "--only", "small", "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["is_smoke"]
    assert result["copy_gb_per_s"] > 0
    assert result["skipped"] == []
    programs = {p["program"]: p for p in result["models"]["small"]["programs"]}
    assert list(programs) == ["plain", "eagle3 K=2, 2 drafts forced"]
    for program in programs.values():
        assert [step["batch"] for step in program["steps"]] == [1, 3]
        for step in program["steps"]:
            assert step["step_ms"]["p50"] > 0
            assert step["host_us"]["p50"] > 0
            assert 0 <= step["idle_share"] < 1
            assert step["share_of_copy"] > 0
        assert program["num_recompiles"] == 0
        assert program["ratio"]["eager"] > 0
        assert {graph["phase"] for graph in program["cudagraphs"]["graphs"]} == {
            "decode", "prefill",
        }  # fmt: skip
    forced = programs["eagle3 K=2, 2 drafts forced"]["steps"]
    assert [step["emitted_per_row"] for step in forced] == [3, 3]
    assert [step["emitted_per_row"] for step in programs["plain"]["steps"]] == [1, 1]


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path) -> None:
    options = ["--smoke", "--minutes", "-1", "--json", str(tmp_path / "out.json")]
    assert gpu_check.main(options) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["models"] == {}
    assert len(result["skipped"]) == len(SMOKE_SHAPES)


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "--smoke" in capsys.readouterr().err


def test_a_recompilation_or_a_failed_test_is_a_failure() -> None:
    good = {"models": {"m": {"programs": [{"num_recompiles": 0}]}}}
    assert not gpu_check.is_broken(good)
    assert gpu_check.is_broken({**good, "tests": {"exit_status": 1}})
    assert gpu_check.is_broken({"models": {"m": {"programs": [{"num_recompiles": 1}]}}})


def test_the_real_shapes_are_those_that_were_asked_for() -> None:
    shape = SHAPES["llama-3.1-8b"]
    assert set(shape.forced) == set(range(shape.num_draft_tokens + 1)), "lengths 1 to K+1"
    assert (shape.batches[0], shape.batches[-1]) == (1, 64)
    sizes = shape.config
    per_layer = sizes["hidden_size"] * (
        3 * sizes["intermediate_size"]
        + (2 * sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]) * sizes["head_dim"]
    )
    weights = sizes["num_hidden_layers"] * per_layer
    assert weights + 2 * sizes["vocab_size"] * sizes["hidden_size"] == pytest.approx(
        8.03e9, rel=1e-2
    )
