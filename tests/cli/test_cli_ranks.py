"""`--tensor-parallel-size`: the command starts its ranks, answers and ends as one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import httpx2
import pytest

import compilespec
from compilespec import SamplingParams
from tests.support.rank_commands import ROOT, rank_of, save_toy

PROMPT, COUNT = "ab ab ab", 12
OPTIONS = ["--spec", "ngram", "--backend", "eager", "--dtype", "float64"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_toy(tmp_path_factory.mktemp("model")))


def start(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "compilespec", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment, **streams
    )


def text_of_one_process(directory: str) -> str:
    with compilespec.compile(
        directory, "ngram", backend="eager", dtype="float64", max_seq_len=128
    ) as engine:
        (output,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=COUNT))
        return str(output.text)


def test_generate_prints_the_text_of_one_process(directory: str) -> None:
    arguments = ["generate", "--model", directory, *OPTIONS, "--tensor-parallel-size", "2"]
    process = start(*arguments, "--prompt", PROMPT, "--max-new-tokens", str(COUNT))
    printed, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-2000:]
    assert text_of_one_process(directory).strip() in printed


def test_bench_measures_one_engine_after_another(directory: str) -> None:
    arguments = ["bench", "--model", directory, *OPTIONS[2:], "--tensor-parallel-size", "2"]
    methods = ["--methods", "all", "--num-draft-tokens", "2", "--sampled", "coupled,rejection"]
    few = ["--prompt", PROMPT, "--max-new-tokens", str(COUNT), "--rounds", "1", "--json"]
    process = start(*arguments, *methods, *few)
    printed, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-2000:]
    result = json.loads(printed)
    assert result["wrong"] == []
    assert list(result["sampled"]) == ["coupled", "rejection"]
    for table in (result["comparison"], *result["sampled"].values()):
        names = [row["name"] for row in table["rows"]]
        assert names[-1] == "plain"
        assert "ngram K=2" in names
    assert "eagle3 K=2" in result["skipped"]


def test_a_server_of_two_ranks_answers_and_ends_with_a_rank_that_is_killed(directory: str) -> None:
    arguments = ["serve", "--model", directory, *OPTIONS, "--tensor-parallel-size", "2"]
    process = start(*arguments, "--port", "0", "--served-model-name", "toy", "--max-seq-len", "128")
    try:
        address = _address(process)
        asked = {"model": "toy", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
        answer = httpx2.post(f"{address}/v1/completions", json=asked, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text_of_one_process(directory)
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - killed < 30
        assert process.returncode == 128 + signal.SIGKILL
        assert "rank 1 was ended by signal 9, and the job with it" in errors
    finally:
        process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(r"https?://[\d.]+:\d+", line):
            return found[0]
    raise AssertionError("".join(seen)[-3000:])
