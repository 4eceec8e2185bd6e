"""`tools.gpu_check`: `--smoke` runs what the real check runs; parts that fail cost themselves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec.program import StepKey
from tools import gpu_check, parts
from tools.gpu import measure, steps
from tools.gpu.measure import PLAIN, VERIFY
from tools.gpu.models import SHAPES, SMOKE_SHAPES, make_target
from tools.gpu.summary import part_name
from tools.gpu_check import GOALS_OF, Part


def test_smoke_runs_the_whole_path(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert gpu_check.main(["--smoke", "--only", "small", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["is_smoke"]
    assert result["skipped"] == [
        "small, flash: flash_attn_interface is not installed",
        "small, vllm: vllm is not installed",
    ]
    ways = [PLAIN, VERIFY, "2", "eager", "compiled"]
    assert list(result["parts"]) == ["copy", *(f"small, {way}" for way in ways)]
    assert result["parts"]["copy"]["records"][0]["copy_gb_per_s"] > 0
    for way, emitted in ((PLAIN, 1), ("2", 3)):
        began, *steps, ended = result["parts"][f"small, {way}"]["records"]
        assert set(began["attention"].values()) == {"C++"}
        assert {graph["phase"] for graph in began["cudagraphs"]["graphs"]} == {"decode", "prefill"}
        assert [step["batch"] for step in steps] == [1, 3]
        assert [step["emitted_per_row"] for step in steps] == [emitted, emitted]
        for step in steps:
            assert step["step_ms"]["p50"] > 0
            assert step["host_us"]["p50"] > 0
            assert 0 <= step["idle_share"] < 1
            assert step["sampled"]["step_ms"]["p50"] > 0
            assert step["sampled"]["emitted_per_row"] == emitted
        assert ended["num_recompiles"] == 0
        assert result["share_of_copy"][f"small, {way}"] > 0
        assert result["times_as_fast_as"][f"small, {way}"]["eager"] > 0
    assert all(goal["measured"] is not None for goal in result["goals"])


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert gpu_check.main(["--smoke", "--minutes", "-1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["parts"] == {}
    planned = dict(gpu_check.parts_of(SMOKE_SHAPES, is_smoke=True, tests=True))
    assert len(result["skipped"]) == len(planned)
    assert all(goal["is_met"] is None for goal in result["goals"])


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "--smoke" in capsys.readouterr().err
    assert gpu_check.main(["--smoke", "--only", GOALS_OF]) == 2
    assert "--smoke has small, moe" in capsys.readouterr().err


# --- parts that fail ---


def fake(code: str, **limits: Any) -> Part:
    return Part(arguments=("-c", code), **{"limit_s": 60, "least_s": 1, **limits})


def printing(*records: dict[str, Any]) -> str:
    return "; ".join(f"print({json.dumps(record)!r}, flush=True)" for record in records)


def step(ms: float, **more: Any) -> dict[str, Any]:
    times = {"step_ms": {"p50": ms}, "device_ms": {"p50": ms}}
    return {"batch": 1, "idle_share": 0.01, "weight_gb": 16.0, **times, **more}


RATE = {"tokens_per_s": {"p50": 200.0}, "num_recompiles": 0}
COPY = printing({"copy_gb_per_s": 3000.0})


def check(planned: dict[str, Part], path: Path, seconds: float = 600) -> dict[str, Any]:
    result = gpu_check.run_parts(planned, path, {}, [GOALS_OF], seconds)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result, default=str))
    return result


def test_parts_that_crash_and_hang_cost_only_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they had measured counts, and the file is there while later ones run."""
    path = tmp_path / "out.json"
    reads = f"import json; n = len(json.load(open({str(path)!r}))['parts'])"
    result = check(
        {
            "copy": fake(COPY),
            part_name(GOALS_OF, PLAIN): fake(printing(step(6.0)) + "; import os; os.abort()"),
            part_name(GOALS_OF, VERIFY): fake(
                printing(step(7.2)) + "; import time; time.sleep(600)", limit_s=3
            ),
            "after": fake(f"{reads}; print(json.dumps({{'seen': n}}))"),
            part_name(GOALS_OF, "vllm"): fake("", why_not="vLLM is not installed"),
        },
        path,
    )
    assert gpu_check.is_broken(result)
    statuses = [part["exit_status"] for part in result["parts"].values()]
    assert statuses == [0, -6, 124, 0]
    assert result["parts"]["after"]["records"] == [{"seen": 3}]
    assert result["skipped"] == [f"{GOALS_OF}, vllm: vLLM is not installed"]
    share, ratio, idle = result["goals"]
    assert share["measured"] == pytest.approx(16 / 6e-3 / 3000)
    assert ratio["measured"] == pytest.approx(1.2)
    assert [goal["is_met"] for goal in (share, ratio, idle)] == [True, True, True]
    assert "FAILED (124): stopped after 3 s" in capsys.readouterr().out


def test_goals_that_are_missed_and_ratios_to_peers(tmp_path: Path) -> None:
    result = check(
        {
            "copy": fake(COPY),
            part_name(GOALS_OF, PLAIN): fake(printing(step(8.0, idle_share=0.3), RATE)),
            part_name(GOALS_OF, VERIFY): fake(printing(step(12.0), RATE)),
            part_name(GOALS_OF, "eager"): fake(printing({"tokens_per_s": {"p50": 40.0}})),
        },
        tmp_path / "out.json",
    )
    assert not gpu_check.is_broken(result)
    assert [goal["is_met"] for goal in result["goals"]] == [False, False, False]
    assert result["times_as_fast_as"] == {
        part_name(GOALS_OF, way): {"eager": 5.0} for way in (PLAIN, VERIFY)
    }


def test_a_recompilation_or_a_failed_part_is_a_failure() -> None:
    def result(status: int, recompiled: int) -> dict[str, Any]:
        records = [{"num_recompiles": recompiled}]
        return {"parts": {"one": {"exit_status": status, "records": records}}}

    assert not gpu_check.is_broken(result(0, 0))
    assert gpu_check.is_broken(result(1, 0))
    assert gpu_check.is_broken(result(0, 1))


# --- what is planned ---


def test_what_the_goals_need_comes_first() -> None:
    planned = dict(gpu_check.parts_of(SHAPES, is_smoke=False, tests=True))
    assert list(planned)[:4] == ["copy", f"{GOALS_OF}, plain", f"{GOALS_OF}, verify", "tests"]
    assert {f"{name}, {peer}" for name in SHAPES for peer in ("eager", "vllm")} <= set(planned)
    for part in planned.values():
        assert part.least_s <= part.limit_s <= 240


def test_all_files_with_gpu_tests_are_named() -> None:
    marked = {
        str(path.relative_to(parts.ROOT))
        for path in (parts.ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.gpu$", path.read_text(), re.MULTILINE)
    }
    assert marked == set(gpu_check.GPU_TESTS)
    command = dict(gpu_check.parts_of(SHAPES, is_smoke=False, tests=True))["tests"].arguments
    assert set(gpu_check.GPU_TESTS) < set(command)
    assert "tests" not in command


def test_the_text_of_failed_tests_is_kept() -> None:
    done = fake("[print(f'line {n}') for n in range(100)]; exit(1)")
    error = parts.run(done.arguments, 60)["error"]
    assert error[0] == "line 0"
    assert error[-1] == "line 99"


# --- what is measured ---


def test_greedy_and_sampled_steps_are_both_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows say nothing of sampling, the full step is launched."""
    shape = SMOKE_SHAPES["small"]
    model = make_target(shape, torch.float32, torch.device("cpu"))
    launched = []
    with compilespec.compile(
        model, "none", backend="eager", greedy_step=True, max_batch_size=1, max_seq_len=64
    ) as engine:
        runner: Any = engine.executor
        calls = {**runner.calls}
        for key, call in calls.items():
            monkeypatch.setattr(
                call, "_phase", replace(call._phase, call=noting(launched, key, call._phase.call))
            )
        measure.measure_steps(runner, model, 1, shape, measure.SMOKE)
    decodes = [key.kind for key in launched if key.phase == "decode"]
    assert set(decodes[: len(decodes) // 2]) == {"greedy"}
    assert set(decodes[len(decodes) // 2 :]) == {"full"}


def noting(launched: list[StepKey], key: StepKey, call: Any) -> Any:
    return lambda *inputs: launched.append(key) or call(*inputs)


def test_device_time_leaves_out_the_hosts_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"host": 0.0, "device": 0.0}  # seconds

    def enqueue(seconds: float) -> float:
        clock["device"] = max(clock.values()) + seconds
        return clock["device"]

    class Event:
        at = 0.0

        def record(self) -> None:
            self.at = enqueue(0.0)

        def synchronize(self) -> None:
            clock["host"] = max(clock.values())

        def elapsed_time(self, later: Event) -> float:
            return 1e3 * (later.at - self.at)

    def call() -> None:
        clock["host"] += 0.005  # before it launches
        enqueue(0.002)

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: enqueue(cycles / 2e9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: Event().synchronize())
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock["host"])
    assert steps.device_ms(call, torch.device("cuda")) == pytest.approx(2.0)


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
