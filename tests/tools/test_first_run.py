"""`tools.gpu.first_run`: a tiny run is the real one; parts that fail or are killed keep lines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec.program import StepKey
from tools import parts
from tools.gpu import first_run, measure, steps
from tools.gpu.first_run import EAGLE3, PLAIN, VERIFY, Part, Record
from tools.gpu.models import SHAPES, TINY_SHAPES, make_target

IN_PROCESS = ("kernels",)  # it runs pytest


def lines_of(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_lines(lines: Sequence[Record]) -> None:
    """Every part but those that need a package ended well, and said what it is for."""
    of = {name: [one for one in lines if one["part"] == name] for name, _ in first_run.plan()}
    ended = {name: records[-1] for name, records in of.items()}
    skipped = {name for name, record in ended.items() if "skipped" in record}
    assert skipped <= {"flash"}
    assert all(record["exit_status"] == 0 for name, record in ended.items() if name not in skipped)
    assert any(record.get("copy_gb_per_s", 0) > 0 for record in of["ceilings"])
    assert all(record["outcome"] == "passed" for record in of["kernels"] if "test" in record)
    assert any("ngram" in record.get("test", "") for record in of["kernels"])
    assert of["pair"][-2]["same_greedy"] == of["pair"][-2]["same_sampled"] == [True] * 3
    assert [record.get("replays") for record in of["pair"][:2]] == [None, 16]
    for way, emitted in ((PLAIN, 1), (EAGLE3, 3)):
        records = of[way]
        kinds = {graph["phase"] for graph in records[0]["cudagraphs"]["graphs"]}
        assert kinds == {"decode", "prefill"}
        decodes = [record for record in records if "batch" in record]
        assert [record["batch"] for record in decodes] == [1, 3, 1, 3]
        assert ["sampled" in record for record in decodes] == [False, False, True, True]
        assert all(record["emitted_per_row"] == emitted for record in decodes)
        assert all(0 <= record["idle_share"] < 1 for record in decodes)
        assert [one["prefill_tokens"] for one in records if "prefill_tokens" in one] == [7, 21]
        assert records[-2]["num_recompiles"] == 0
    assert [*of["warm"][0]] == [*of[PLAIN][0]]
    assert len([record for record in of["alone"] if "kernel" in record]) == 13
    assert of["peer"][0]["tokens_per_s"]["p50"] > 0
    assert len([one for one in lines if one["part"] == "goals"][-1]) == 4


def test_the_whole_script_runs_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert first_run.main(["--device", "cpu", "--tiny", "--file", str(path)]) == 0
    check_lines(lines_of(path))


def test_all_parts_run_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same lines, without the start of a process for each part."""

    def run(command: Sequence[str], limit_s: float, on_record: Any) -> Record:
        if set(IN_PROCESS) & set(command):
            records: list[Record] = [{"test": "ngram", "outcome": "passed"}]
        else:
            records = []
            monkeypatch.setattr(measure, "tell", records.append)
            assert measure.main([*command[2:]]) == 0
        for record in records:
            on_record(json.loads(json.dumps(record)))
        return {"exit_status": 0, "records": records}

    monkeypatch.setattr(parts, "run", run)
    monkeypatch.setattr(measure.report, "environment", lambda: {"commit": "none"})
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    path = tmp_path / "out.jsonl"
    assert first_run.main(["--device", "cpu", "--tiny", "--file", str(path)]) == 0
    check_lines(lines_of(path))
    assert lines_of(path) == [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    few = ["--device", "cpu", "--tiny", "--seconds", "-1", "--file", str(path)]
    assert first_run.main(few) == 0
    lines = lines_of(path)
    assert [line["part"] for line in lines] == [name for name, _ in first_run.plan()]
    assert all("skipped" in line for line in lines)


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_run.torch.cuda, "is_available", lambda: False)
    assert first_run.main([]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().err


# --- parts that fail ---


def printing(*records: Record) -> str:
    return "; ".join(f"print({json.dumps(record)!r}, flush=True)" for record in records)


def step(ms: float, **more: Any) -> Record:
    times = {"step_ms": {"p50": ms}, "device_ms": {"p50": ms}}
    return {"batch": 1, "idle_share": 0.01, "weight_gb": 16.0, **times, **more}


def run_codes(
    codes: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, **limits: float
) -> tuple[dict[str, Record], list[Record]]:
    """Parts that run some code: what they did, and the lines."""
    run, lines = parts.run, []
    limit_s = limits.get("limit_s", 60.0)
    planned = {
        name: Part(asked=(code,), limit_s=limit_s if "sleep" in code else 60, least_s=1)
        for name, code in codes.items()
    }

    def run_code(command: Sequence[str], limit_s: float, **given: Any) -> Record:
        return run(["-c", command[-1]], limit_s, **given)

    monkeypatch.setattr(parts, "run", run_code)
    done = first_run.run_parts(planned, (), 600, lines.append)
    return done, lines


def test_parts_that_crash_and_hang_cost_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they had measured counts."""
    codes = {
        "ceilings": printing({"copy_gb_per_s": 3000.0}),
        PLAIN: printing(step(6.0)) + "; import os; os.abort()",
        VERIFY: printing(step(7.2)) + "; import time; time.sleep(600)",
    }
    done, lines = run_codes(codes, monkeypatch, limit_s=3)
    assert first_run.is_broken(done)
    assert [part["exit_status"] for part in done.values()] == [0, -6, 124]
    assert done[VERIFY]["error"] == ["stopped after 3 s"]
    goals = [line for line in lines if line["part"] == "goals"]
    assert [len(goal) for goal in goals] == [3, 4], "told as soon as they are known"
    share, idle, ratio = [value for name, value in goals[-1].items() if name != "part"]
    assert share == pytest.approx(16 / 6e-3 / 3000)
    assert (idle, ratio) == (0.01, pytest.approx(1.2))


def test_a_killed_script_keeps_its_lines_and_ends_its_part(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    code = "import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(600)"
    script = (
        "import sys; from tools import parts; from tools.gpu import first_run; run = parts.run\n"
        f"parts.run = lambda command, limit_s, **given: run(['-c', {code!r}], limit_s, **given)\n"
        f"sys.exit(first_run.main(['--device', 'cpu', '--tiny', '--file', {str(path)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=parts.ROOT,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    while not path.exists() or "\n" not in path.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    pid = lines_of(path)[0]["pid"]
    process.terminate()
    assert process.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_recompilation_or_a_failed_part_is_a_failure() -> None:
    def result(status: int, recompiled: int) -> dict[str, Record]:
        return {"one": {"exit_status": status, "records": [{"num_recompiles": recompiled}]}}

    assert not first_run.is_broken(result(0, 0))
    assert first_run.is_broken(result(1, 0))
    assert first_run.is_broken(result(0, 1))


# --- what is planned ---


def test_what_matters_most_comes_first() -> None:
    planned = dict(first_run.plan())
    assert [*planned][:5] == ["ceilings", "kernels", "pair", PLAIN, EAGLE3]
    for part in planned.values():
        assert part.least_s <= part.limit_s <= 150
        assert part.asked[0] in measure.PARTS
    assert sum(part.limit_s for part in [*planned.values()][:5]) < 560


def test_all_files_with_gpu_tests_are_named() -> None:
    marked = {
        str(path.relative_to(parts.ROOT))
        for path in (parts.ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(@|pytestmark = )pytest\.mark\.gpu$", path.read_text(), re.MULTILINE)
    }
    assert marked == set(measure.GPU_TESTS)


def test_the_text_of_failed_tests_is_kept() -> None:
    error = parts.run(["-c", "[print(f'line {n}') for n in range(100)]; exit(1)"], 60)["error"]
    assert error[0] == "line 0"
    assert error[-1] == "line 99"


# --- what is measured ---


def test_greedy_and_sampled_steps_are_both_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows say nothing of sampling, the full step is launched."""
    shape = replace(TINY_SHAPES["llama-3.1-8b"], batches=(1,))
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
        setting = measure.setting_of("cpu", is_tiny=True)
        assert len([*measure.measure_steps(runner, model, shape, setting)]) == 4
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
    assert shape.batches == (1, 8, 64)
    sizes = shape.config
    per_layer = sizes["hidden_size"] * (
        3 * sizes["intermediate_size"]
        + (2 * sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]) * sizes["head_dim"]
    )
    weights = sizes["num_hidden_layers"] * per_layer
    assert weights + 2 * sizes["vocab_size"] * sizes["hidden_size"] == pytest.approx(
        8.03e9, rel=1e-2
    )
