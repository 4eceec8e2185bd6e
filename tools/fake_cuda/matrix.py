"""Families, methods, backends and devices on the fake device: `make fake-cuda-matrix`.

Every part runs in a separate process, and tools/bench/results/fake-cuda.json is written anew after
each; parts that are not run keep what the file says of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from tools import parts
from tools.bench import report

RESULT = "fake-cuda"
INDUCTOR = ("llama", "qwen3_moe", "gpt_oss", "qwen3_5", "deepseek_v3")
OTHERS = (
    "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "gpt_neox", "gpt2",
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5",
    "olmo_hybrid", "kimi_linear", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "jamba",
    "lfm2",
)  # fmt: skip
_KINDS = ("none", "ngram", "eagle3", "mtp", "tree", "suffix+eagle3")
_LIMIT_S = 3600.0

# By name: a family, methods (none named: all), and flags.
PARTS: dict[str, tuple[str, ...]] = {
    "llama": ("llama",),
    "llama, late": ("llama", *_KINDS, "--lazy"),
    "llama, cuda:1": ("llama", *_KINDS, "--device", "cuda:1"),
    **{family: (family, "none", "ngram", "eagle3") for family in OTHERS},
    **{
        f"{family} {method}, inductor": (family, method, "--backend", "inductor")
        for family in INDUCTOR
        for method in ("none", "eagle3")
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a part failed or found a fault."""
    parser = argparse.ArgumentParser(prog="python -m tools.fake_cuda.matrix", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="in place of all")
    given = parser.parse_args(arguments)
    path = report.RESULTS_DIR / f"{RESULT}.json"
    known: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    for name in given.parts or PARTS:
        known[name] = run_part(name)
        print(name, faults_of(known[name]) or "ok", flush=True)
        ordered = {one: known[one] for one in PARTS if one in known}
        report.write_json(
            RESULT, {"benchmark": "engines on the fake CUDA device", "parts": ordered}
        )
    return int(any(faults_of(known[name]) for name in given.parts or PARTS))


def run_part(name: str) -> dict[str, Any]:
    about = report.environment()
    environment = {"FAKE_CUDA_DEVICES": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    done = parts.run(["-m", "tests.support.fake_cuda", *PARTS[name]], _LIMIT_S, environment)
    return {**{what: about[what] for what in ("date", "commit", "versions")}, **done}


def faults_of(part: dict[str, Any]) -> list[str]:
    """What may not be; a part that ended early is a fault."""
    found = [fault for record in part["records"] for fault in record["faults"]]
    if part["exit_status"]:
        found.append(f"exit status {part['exit_status']}: {part.get('error', [''])[-1]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
