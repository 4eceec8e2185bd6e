"""Faults planted in a step are found without a GPU: what would be slow, or wrong, on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What is said of a step with all the faults of `tests.support.planted_faults`."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.planted_faults"], capture_output=True, text=True,
        env=environment, check=False, cwd=ROOT, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines: list[str] = json.loads(done.stdout.splitlines()[-1])
    return lines


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("a clone of the cache", "a cache is copied: triton_"),
        ("a weight in another layout", "generated code reads weights: target."),
        ("an item", "the host waits: aten::_local_scalar_dense"),
        ("copies of pageable memory", "host and device exchange data: aten::copy_, aten::copy_"),
        ("too much shared memory", "bytes of shared memory, of 166912"),
    ],
)
def test_a_planted_fault_is_found(said: list[str], fault: str, line: str) -> None:
    """A step without a fault, of which nothing is said, is in `test_steps.py`."""
    assert any(line in text for text in said), f"{fault}: {said}"
