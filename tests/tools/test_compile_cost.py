"""The compile-cost benchmark: how growth is computed, and what the recorded result says."""

from __future__ import annotations

import json

import pytest

from tools.bench import compile_cost
from tools.bench.report import RESULTS_DIR


def entry(units: str, layers: int, seconds: float, start: str = "cold") -> dict[str, object]:
    keys = ("lower_s", "total_s", "lower_cpu_s", "total_cpu_s")
    return {"units": units, "num_layers": layers, "start": start, **dict.fromkeys(keys, seconds)}


def test_growth_is_the_deepest_over_the_shallowest_cold_start() -> None:
    runs = [entry("pieces", 8, 10.0), entry("pieces", 16, 11.0), entry("pieces", 32, 13.0)]
    runs += [entry("pieces", 32, 99.0, "warm"), entry("whole", 8, 5.0)]
    growth = compile_cost.growth(runs)
    assert list(growth) == ["pieces"], "whole steps have no deepest one"
    assert growth["pieces"]["total_cpu_s"] == pytest.approx(1.3)


def test_the_recorded_result_is_within_the_limit() -> None:
    result = json.loads((RESULTS_DIR / "compile-cost.json").read_text())
    growth = compile_cost.growth(result["runs"])["pieces"]
    assert growth[compile_cost.JUDGED] <= compile_cost.GROWTH_LIMIT == result["limit"]
    cold = [run for run in result["runs"] if run["start"] == "cold"]
    warm = [run for run in result["runs"] if run["start"] == "warm"]
    assert all(run["from_cache"] and run["num_compiled"] == 0 for run in warm)
    assert all(run["num_recompiles"] == 0 for run in result["runs"])
    for layers in compile_cost.LAYERS:
        texts = [run["tokens"] for run in result["runs"] if run["num_layers"] == layers]
        assert all(tokens == texts[0] for tokens in texts), "pieces and whole steps, cold and warm"
    compiled = {run["num_layers"]: run["num_compiled"] for run in cold if run["units"] == "pieces"}
    assert set(compiled.values()) == {6}, "three pieces a phase, at any depth"
