"""Runs every part in a separate process, and keeps what each has shown in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import parts
from tools.bench import report

_STEPS = ("tools.without_gpu", "steps")
_ONE_K = ("--spec", "eagle3", "--num-draft-tokens", "2")
_GREEDY = (*_STEPS, "llama-3.1-8b", *_ONE_K, "--only", "decode.2.greedy")
_SEVERAL_K = ("--spec", "eagle3", "--num-draft-tokens", "0", "2")
INTERPRETED = (
    "llama", "qwen3_moe", "gpt_oss", "gemma2", "qwen3_5", "deepseek_v3", "llama-bf16",
)  # fmt: skip

# By name: the module to run, and its arguments.
PARTS: dict[str, tuple[str, ...]] = {
    "smallest step": (*_STEPS, "llama-3.1-8b", "--layers", "1", "--only", "decode.0.greedy"),
    "llama-3.1-8b, sm_90": (*_STEPS, "llama-3.1-8b", *_SEVERAL_K),
    "before the passes for speed": (*_GREEDY, "--plain"),
    "after the passes for speed": _GREEDY,
    "moe, sm_90": (*_STEPS, "moe", *_ONE_K),
    "llama-3.1-8b, sm_80": (*_STEPS, "llama-3.1-8b", *_ONE_K, "--arch", "sm_80"),
    "moe, sm_80": (*_STEPS, "moe", *_ONE_K, "--arch", "sm_80"),
    **{
        f"pieces of {shape}": (*_STEPS, shape, "--layers", "3", "--only", "prefill", "--pieces")
        for shape in ("llama-3.1-8b", "moe")
    },
    **{
        f"llama-3.1-8b, {arch}": (*_STEPS, "llama-3.1-8b", "--layers", "1", "--arch", arch)
        for arch in ("sm_86", "sm_89", "sm_100", "sm_120")
    },
    "quantized": ("tools.without_gpu", "quantized"),
    **{f"interpreted {case}": ("tests.support.interpreted_cuda", case) for case in INTERPRETED},
}


def prove(path: Path, only: Sequence[str] = ()) -> int:
    """Run the parts, or `only` some, and write what they print to `path` as it comes.

    Parts that are not run keep what the file says of them.  Returns: 1 if a part failed or found a
    fault, else 0.
    """
    known = json.loads(path.read_text())["parts"] if path.exists() else {}
    for name in only or PARTS:
        print(json.dumps({"part": name}), flush=True)
        known[name] = run_part(name)
        for record in (*known[name]["records"], *known[name].get("error", ())):
            print(json.dumps(record), flush=True)
        ordered = {name: known[name] for name in PARTS if name in known}
        result = {"benchmark": "the CUDA path without a GPU", "parts": ordered}
        report.write_json(path.stem, result, path.parent)
    return int(any(faults_of(part) for part in known.values()))


def run_part(name: str, timeout_s: float = 3600) -> dict[str, Any]:
    """When and with what it ran, its seconds and exit status, and the records that it printed."""
    about, is_interpreted = report.environment(), name.startswith("interpreted")
    environment = {"TRITON_INTERPRET": str(int(is_interpreted))}
    done = parts.run(["-m", *PARTS[name]], timeout_s, environment)
    return {
        "command": f"python -m {' '.join(PARTS[name])}",
        **{what: about[what] for what in ("date", "commit", "versions")},
        **done,
    }


def faults_of(part: dict[str, Any]) -> list[str]:
    """What a part found that may not be; a part that failed, or said nothing, is a fault."""
    if part["exit_status"] or not part["records"]:
        return [f"exit status {part['exit_status']}", *part.get("error", ())]
    return [fault for record in part["records"] for fault in record["faults"]]
