"""Every Triton kernel compiles to machine code without a GPU, at real sizes, for every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from tools.without_gpu.facts import MOST_STACK
from tools.without_gpu.gpus import GPUS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "triton_aot.py"


def compile_cases(function: str, arch: str) -> dict[str, list[dict[str, Any]]]:
    """In a separate process: this one may have chosen the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(SCRIPT.with_name("triton_cases.py")), function, arch],
        capture_output=True, text=True, env=environment, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def check(result: dict[str, list[dict[str, Any]]], arch: str) -> None:
    for name, kernels in result.items():
        assert kernels, f"{name} launched nothing"
        for one in kernels:
            assert one["shared"] <= GPUS[arch].most_shared, (name, one)
            assert one["registers"] <= 255, (name, one)
            # a few registers may spill, no tile
            assert one["stack"] <= (64 if arch == "sm_90" else MOST_STACK), (name, one)


def test_the_decode_step_compiles():
    check(compile_cases("common_cases", "sm_90"), "sm_90")


@pytest.mark.parametrize("arch", GPUS)
def test_all_kernels_compile(arch: str) -> None:
    result = compile_cases("all_cases", arch)
    check(result, arch)
    for name, kernels in result.items():
        print(name)
        for one in kernels:
            print("   ", one)


def test_every_kernel_module_is_compiled():
    root = ROOT / "compilespec" / "ops"
    folders = {path.parent.name for path in root.glob("*/kernel.py")}
    text = SCRIPT.with_name("triton_cases.py").read_text()
    assert {name for name in folders if f"compilespec.ops.{name} import kernel" in text} == folders
