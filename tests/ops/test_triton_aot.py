"""Every Triton kernel compiles to sm_90 machine code without a GPU, at real sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "triton_aot.py"
MOST_SHARED = 227 * 1024  # bytes of shared memory that a program may have on sm_90


def compile_cases(function: str) -> dict[str, list[dict[str, Any]]]:
    """In a separate process: this one may have chosen the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(SCRIPT.with_name("triton_cases.py")), function],
        capture_output=True, text=True, env=environment, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def check(result: dict[str, list[dict[str, Any]]]) -> None:
    for name, kernels in result.items():
        assert kernels, f"{name} launched nothing"
        for one in kernels:
            assert one["shared"] <= MOST_SHARED, (name, one)
            assert one["registers"] <= 255, (name, one)
            assert one["stack"] <= 64, (name, one)  # a few registers may spill, no tile


def test_the_decode_step_compiles():
    check(compile_cases("common_cases"))


def test_all_kernels_compile():
    result = compile_cases("all_cases")
    check(result)
    for name, kernels in result.items():
        print(name)
        for one in kernels:
            print("   ", one)


def test_every_kernel_module_is_compiled():
    root = ROOT / "compilespec" / "ops"
    folders = {path.parent.name for path in root.glob("*/kernel.py")}
    text = SCRIPT.with_name("triton_cases.py").read_text()
    assert {name for name in folders if f"compilespec.ops.{name} import kernel" in text} == folders
