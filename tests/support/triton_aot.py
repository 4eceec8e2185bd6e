"""Compile Triton kernels for a GPU that is not there: launches on meta tensors become compilations.

A driver that knows only the target stands in for CUDA's, so that arguments are specialised as a
real launch would have them; what comes out is the machine code of ptxas.  Run as a script, in a
process of its own, without TRITON_INTERPRET: `python triton_aot.py CASES.py FUNCTION`.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SM_90 = GPUTarget("cuda", 90, 32)


class AbsentGPU:
    """The part of a driver that compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return SM_90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "meta"


def compile_launches(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Run `call`; each launch in it compiles and runs nothing.  One record a kernel compiled."""
    done: list[dict[str, Any]] = []
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        started = time.perf_counter()
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        record = {"kernel": self.__name__, "grid": list(grid), "shared": kernel.metadata.shared,
                  "seconds": round(time.perf_counter() - started, 2)}  # fmt: skip
        done.append(record | resources(kernel.asm["cubin"]))

    triton.runtime.driver.set_active(AbsentGPU())
    JITFunction.run = compile_only  # type: ignore[method-assign]
    try:
        call()
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
    return done


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True,
                              check=True).stdout  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(folder.parent))
    cases = getattr(importlib.import_module(folder.stem), name)
    print(json.dumps({label: compile_launches(call) for label, call in cases().items()}))


if __name__ == "__main__":
    main()
