"""Compile Triton kernels for a GPU that is not there: launches on meta tensors become compilations.

A driver that knows only the target stands in for CUDA's, so that arguments are specialised as a
real launch would have them; what comes out is the machine code of ptxas.  Run as a script, in a
separate process, without TRITON_INTERPRET: `python triton_aot.py CASES.py FUNCTION ARCH`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import triton

from tools.without_gpu.gpus import GPUS, Driver
from tools.without_gpu.machine_code import Kernel, compiling_launches


def compile_launches(call: Callable[[], Any], arch: str = "sm_90") -> list[dict[str, Any]]:
    """Run `call`; each launch in it compiles and runs nothing.  One record a kernel compiled."""
    done: list[dict[str, Any]] = []
    started = time.perf_counter()

    def launched(kernel: Kernel, args: Sequence[Any], grid: tuple[int, ...]) -> None:
        nonlocal started
        seconds, started = round(time.perf_counter() - started, 2), time.perf_counter()
        done.append({"kernel": kernel.name, "grid": list(grid), "shared": kernel.shared,
                     "seconds": seconds, "registers": kernel.registers, "stack": kernel.stack}
        )  # fmt: skip

    triton.runtime.driver.set_active(Driver(GPUS[arch], "meta"))
    with compiling_launches(launched):
        call()
    return done


def main() -> None:
    folder, name, arch = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path.insert(0, str(folder.parent))
    cases = getattr(importlib.import_module(folder.stem), name)
    print(json.dumps({label: compile_launches(call, arch) for label, call in cases().items()}))


if __name__ == "__main__":
    main()
