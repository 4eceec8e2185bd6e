"""`python -m tools.gpu_check`: the gpu tests and the GPU benchmark, within ten minutes on one GPU.

Random weights at real sizes, drafts accepted by force.  Every part runs in a separate process,
and one JSON file is written anew after each: a part that fails or hangs costs only itself.
`--smoke` runs all of it on the CPU with tiny models and emulated graphs: it measures nothing, but
shows that the code works.  `--without-gpu` shows what can be shown of the CUDA path without one:
every step compiled to machine code, and engines on that code, interpreted (`tools.without_gpu`).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools import parts
from tools.bench import report
from tools.gpu.measure import FLASH, PEERS, PLAIN, REAL, SMOKE, VERIFY
from tools.gpu.models import SHAPES, SMOKE_SHAPES, Shape
from tools.gpu.summary import first_step, goals, part_name, ratios, share_of_copy, value_of
from tools.without_gpu.prove import PARTS, prove

GOALS_OF = "llama-3.1-8b"  # the model that the goals are about
# The files with gpu tests: others may need packages of serving or training.
GPU_TESTS = (
    "tests/cudagraphs/test_cudagraphs.py",
    "tests/cudagraphs/test_gpu_graphs.py",
    "tests/ops/test_triton_gpu.py",
)
_EXPECTED_S = 10.0  # of any part: imports, and making a model


@dataclass(frozen=True, kw_only=True)
class Part:
    """What Python is run with, and how long it may take."""

    arguments: tuple[str, ...]
    limit_s: float
    least_s: float = _EXPECTED_S
    """It is skipped if less time is left."""
    why_not: str = ""
    """Why it cannot run here; "" where it can."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, no speeds")
    parser.add_argument("--without-gpu", action="store_true", help="compile and interpret instead")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit (default: 10)")
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), help="models to measure")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=(), metavar="PART",
                        help="of --without-gpu, in place of all: " + ", ".join(PARTS))  # fmt: skip
    parser.add_argument("--no-tests", action="store_true", help="skip the gpu tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: results/gpu-check.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 if a part failed or a program recompiled; 2 where nothing can be run."""
    options = parse(arguments)
    if options.without_gpu:
        return prove(options.json or report.RESULTS_DIR / "without-gpu.json", options.parts)
    if not options.smoke and not torch.cuda.is_available():
        print("gpu_check: no CUDA device; --smoke runs the same code on the CPU", file=sys.stderr)
        return 2
    shapes = SMOKE_SHAPES if options.smoke else SHAPES
    wanted = {name: shape for name, shape in shapes.items() if name in (options.only or shapes)}
    if not wanted:
        print(f"gpu_check: --smoke has {', '.join(shapes)}", file=sys.stderr)
        return 2
    planned = dict(parts_of(wanted, is_smoke=options.smoke, tests=not options.no_tests))
    path = options.json or report.RESULTS_DIR / "gpu-check.json"
    about = {"is_smoke": options.smoke, "dtype": str((SMOKE if options.smoke else REAL).dtype)}
    result = run_parts(planned, path, about, list(wanted), 60 * options.minutes)
    print(f"written to {path}")
    return int(is_broken(result))


def parts_of(
    shapes: Mapping[str, Shape], *, is_smoke: bool, tests: bool
) -> Iterator[tuple[str, Part]]:
    """By name, what matters most first: the goals, the gpu tests, peers, then the other models."""
    smoke = ("--smoke",) if is_smoke else ()

    def measured(*what: str, limit_s: float, least_s: float, why_not: str = "") -> Part:
        return Part(
            arguments=("-m", "tools.gpu.measure", *smoke, *what), limit_s=limit_s,
            least_s=_EXPECTED_S if is_smoke else least_s, why_not=why_not,
        )  # fmt: skip

    def program(model: str, way: str, why_not: str = "") -> tuple[str, Part]:
        part = measured("program", model, way, limit_s=240, least_s=45, why_not=why_not)
        return part_name(model, way), part

    def peers(model: str) -> Iterator[tuple[str, Part]]:
        for name in PEERS:
            why_not = why_missing("vllm") if name == "vllm" else ""
            part = measured("peer", model, name, limit_s=150, least_s=20, why_not=why_not)
            yield part_name(model, name), part

    first, *others = sorted(shapes, key=lambda name: name != GOALS_OF)
    yield "copy", measured("copy", limit_s=60, least_s=10)
    yield program(first, PLAIN)
    yield program(first, VERIFY)
    if tests and not is_smoke:
        command = ("-m", "pytest", "-m", "gpu", "-q", "--tb=short", *GPU_TESTS)
        yield "tests", Part(arguments=command, limit_s=200, least_s=30)
    yield program(first, str(shapes[first].forced[-1]))
    yield program(first, FLASH, why_missing("flash_attn_interface"))
    yield from peers(first)
    for model in others:
        for way in (PLAIN, VERIFY, str(shapes[model].forced[-1])):
            yield program(model, way)
        yield from peers(model)
    for model in (first, *others):
        yield from (program(model, str(count)) for count in shapes[model].forced[:-1])


def why_missing(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def run_parts(
    planned: Mapping[str, Part],
    path: Path,
    about: Mapping[str, Any],
    models: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """Run the parts for which there is time, and write what is known to `path` after each."""
    started = time.monotonic()
    result: dict[str, Any] = {"benchmark": "gpu check", **report.environment(), **about}
    done: dict[str, Any] = {}
    skipped: list[str] = []
    for name, part in planned.items():
        left_s = seconds - (time.monotonic() - started)
        if part.why_not or left_s < part.least_s:
            skipped.append(f"{name}: {part.why_not or f'less than {part.least_s:.0f} s were left'}")
        else:
            done[name] = parts.run(part.arguments, min(part.limit_s, left_s))
            print(_line(name, done[name]), flush=True)
        elapsed_s = round(time.monotonic() - started, 1)
        found = summary(done, models)
        result |= {**found, "parts": done, "skipped": skipped, "elapsed_s": elapsed_s}
        report.write_json(path.stem, result, path.parent)
    return result


def summary(done: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    copied = value_of(done.get("copy"), "copy_gb_per_s")
    about = GOALS_OF if GOALS_OF in models or not models else models[0]
    shares = {
        name: share
        for name, part in done.items()
        if (share := share_of_copy(first_step(part), copied)) is not None
    }
    times_as_fast = {name: ratio for model in models for name, ratio in ratios(done, model).items()}
    return {
        "goals": [goal.as_dict() for goal in goals(done, about)],
        "share_of_copy": shares,
        "times_as_fast_as": times_as_fast,
    }


def is_broken(result: Mapping[str, Any]) -> bool:
    """Whether a part that ran failed, or a program recompiled."""
    ran = result["parts"].values()
    return any(part["exit_status"] or value_of(part, "num_recompiles") for part in ran)


def _line(name: str, part: Mapping[str, Any]) -> str:
    said = f"{name}: {part['seconds']} s"
    if not part["exit_status"]:
        return said
    last = next((line for line in reversed(part["error"]) if line.strip()), "")
    return f"{said}, FAILED ({part['exit_status']}): {last}"


if __name__ == "__main__":
    sys.exit(main())
