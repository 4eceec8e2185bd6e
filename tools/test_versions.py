"""Test compilespec with the versions that people have, and write the matrix of docs/use.md.

`make test-versions` makes an environment for each row of `ROWS`, runs the tests of `TESTS` in it,
then the demo from a cache that has kernels alone, and from a full one.  The counts, the seconds and
the demo's tokens go into `RESULTS`; the page's matrix is made from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "versions.json"
TESTS = (
    "tests/test_torch_door.py", "tests/lowering/test_native.py", "tests/lowering/test_builds.py",
    "tests/lowering/test_host_waits.py", "tests/lowering/test_vector_isas.py",
    "tests/tracing/test_trace.py", "tests/passes/test_to_aten.py",
    "tests/passes/test_aten_passes.py", "tests/passes/test_step_graph.py", "tests/pipeline",
    "tests/ops/test_ops_linear.py",
)  # fmt: skip
PACKAGES = (
    "accelerate", "fastapi", "gguf", "huggingface_hub", "hypothesis", "llguidance", "numpy",
    "openai", "orjson", "pillow", "prometheus-client", "pytest", "pytest-xdist", "rich",
    "safetensors", "setuptools>=77", "sympy", "tokenizers", "torchao", "uvicorn",
)  # fmt: skip
DEMO = """
import json, sys, time
began = time.perf_counter()
import torch, transformers, platform, triton, compilespec
from compilespec import SamplingParams
with compilespec.compile("demo", spec="eagle3", dtype="float32", progress=False) as engine:
    start_s = time.perf_counter() - began
    prompts = ["def main():", "import os\\n", "class Stack:"]
    ids = [list(o.token_ids) for o in engine.generate(prompts, SamplingParams(max_new_tokens=48))]
versions = [platform.python_version(), torch.__version__, transformers.__version__]
print(json.dumps([start_s, ids, versions]))
"""

KERNELS = "from compilespec.ops._build import load_kernels; load_kernels()"  # a wheel has them


@dataclass(frozen=True, kw_only=True)
class Row:
    """One environment."""

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}"

    @property
    def has_cuda(self) -> bool:
        """True where the index has no CPU build of this torch for this Python."""
        return self.torch != "2.13.0"


ROWS = (
    Row(python="3.12", torch="2.11.0", transformers="5.17.0"),
    Row(python="3.11", torch="2.13.0", transformers="5.23.0"),
    Row(python="3.13", torch="2.15.0", transformers="5.24.0"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=Path, default=ROOT / ".venvs", help="where they lie")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in row.name]
    lacking = [one.name for one in rows if one.has_cuda and not (args.envs / one.name).exists()]
    if lacking:
        print(f"CUDA builds alone, 5 GB each with their packages: {', '.join(lacking)}", flush=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in rows:
        python = environment(row, args.envs)
        results[row.name] = measure(row, python)
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        print(row.name, results[row.name], flush=True)


def environment(row: Row, folder: Path) -> Path:
    """The interpreter of an environment, which is made where it is not there."""
    python = folder / row.name / "bin" / "python"
    if not python.exists():
        base = shutil.which(f"python{row.python}")
        if base is None:
            raise SystemExit(f"error: no python{row.python} in PATH")
        subprocess.run([base, "-m", "venv", folder / row.name], check=True)
        install: list[str | Path] = [python, "-m", "pip", "--quiet", "install"]
        torch = f"torch=={row.torch}"
        subprocess.run([*install, torch, "setuptools>=77"], check=True)
        packages = [torch, f"transformers=={row.transformers}", *PACKAGES]
        subprocess.run([*install, *packages], check=True)
    return python


def measure(row: Row, python: Path) -> dict[str, Any]:
    """Counts of tests, the demo's starts and its tokens."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command: list[str | Path] = [python, "-m", "pytest", "-n", "1", "-q", "--tb=short", *TESTS]
    tests = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    last = next(
        (line for line in reversed(tests.stdout.splitlines()) if re.search(r" in \d", line)), ""
    )
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if set(counts) & {"failed", "error"} or not counts:
        print(tests.stdout[-8000:], tests.stderr[-2000:], flush=True)
    with tempfile.TemporaryDirectory() as cache:
        env |= {"COMPILESPEC_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        subprocess.run([python, "-c", KERNELS], cwd="/", env=env, check=True)
        cold, warm = (_demo(python, env) for _ in range(2))
    return {
        "versions": cold[2],
        "tests": counts,
        "cold_s": round(cold[0], 1),
        "warm_s": round(warm[0], 1),
        "tokens": cold[1],
        "same_when_warm": cold[1] == warm[1],
    }


def _demo(python: Path, env: dict[str, str]) -> Any:
    done = subprocess.run(
        [python, "-c", DEMO], env=env, cwd="/", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the demo failed in {python}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def matrix(results: dict[str, Any]) -> str:
    """The table of docs/use.md."""
    lines = [
        "| Python | torch | transformers | tests | demo's tokens | cold start | warm start |",
        "|---|---|---|---|---|---|---|",
    ]
    tokens = [one["tokens"] for one in results.values()]
    for _, one in sorted(results.items(), key=lambda pair: pair[1]["versions"][1]):
        said = ", ".join(f"{n} {word}" for word, n in one["tests"].items())
        is_same = one["tokens"] == tokens[0] and one["same_when_warm"]
        same = "the same" if is_same else "others"
        starts = (f"{one[key]} s" for key in ("cold_s", "warm_s"))
        lines.append("| " + " | ".join((*one["versions"], said, same, *starts)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
