"""`python -m tools.gpu.first_run`: the first ten minutes on a GPU, the most valuable facts first.

Random weights at real sizes.  Every part runs in a separate process with a limit of time, and each
line of JSON is printed, and appended to a file, as soon as it is there: a run that is killed keeps
what was measured.  `--tiny` takes small models, and `--device cpu --tiny` runs all parts without a
GPU.  The part "kernels" needs pytest and hypothesis; the others need nothing more than the package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools import parts
from tools.bench import report
from tools.gpu.measure import EAGLE3, FLASH, PLAIN, VERIFY, WARM

LLAMA = "llama-3.1-8b"
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What `tools.gpu.measure` is asked, and how long it may take."""

    asked: tuple[str, ...]
    limit_s: float
    least_s: float
    """It is skipped if less time is left."""
    needs: str = ""
    """A package; where it is not installed, the part is skipped."""


def plan() -> Iterator[tuple[str, Part]]:
    """The parts by name, in order."""

    def program(model: str, way: str, limit_s: float, least_s: float, needs: str = "") -> Part:
        asked = ("program", model, way)
        return Part(asked=asked, limit_s=limit_s, least_s=least_s, needs=needs)

    yield "ceilings", Part(asked=("ceilings",), limit_s=45, least_s=10)
    yield "kernels", Part(asked=("kernels",), limit_s=90, least_s=20, needs="pytest")
    yield "pair", Part(asked=("pair",), limit_s=80, least_s=20)
    yield PLAIN, program(LLAMA, PLAIN, 150, 45)
    yield EAGLE3, program(LLAMA, EAGLE3, 150, 45)
    yield WARM, program(LLAMA, WARM, 60, 20)
    yield "moe", program("moe", PLAIN, 100, 40)
    yield "alone", Part(asked=("alone", LLAMA), limit_s=60, least_s=15)
    peer = "vllm" if importlib.util.find_spec("vllm") else "compiled"
    yield "peer", Part(asked=("peer", LLAMA, peer), limit_s=120, least_s=25)
    yield FLASH, program(LLAMA, FLASH, 120, 40, "flash_attn_interface")
    yield VERIFY, program(LLAMA, VERIFY, 120, 40)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.first_run", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, no speeds")
    parser.add_argument("--seconds", type=float, default=560.0, help="in all (default: 560)")
    parser.add_argument("--only", nargs="+", choices=[name for name, _ in plan()], metavar="PART")
    parser.add_argument("--file", type=Path, default=report.RESULTS_DIR / "first-run.jsonl",
                        help="where lines are appended (default: %(default)s)")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if a part failed or a program recompiled; 2 without the device."""
    options = parse(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        print("first_run: no CUDA device; --device cpu --tiny runs without one", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part that runs is ended too
    about = ("--device", options.device, *(["--tiny"] if options.tiny else []))
    planned = {name: part for name, part in plan() if name in (options.only or dict(plan()))}
    with options.file.open("a") as file:

        def tell(record: Record) -> None:
            line = json.dumps(record, default=str)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        return int(is_broken(run_parts(planned, about, options.seconds, tell)))


def run_parts(
    planned: Mapping[str, Part],
    about: Sequence[str],
    seconds: float,
    tell: Callable[[Record], None],
) -> dict[str, Record]:
    """Run the parts for which there is time, and tell of every line of theirs as it comes."""
    started = time.monotonic()
    done: dict[str, Record] = {}
    known: Record = {}
    for name, part in planned.items():
        left_s = seconds - (time.monotonic() - started)
        if reason := why_not(part, left_s):
            tell({"part": name, "skipped": reason})
            continue

        def said(record: Record, name: str = name) -> None:
            tell({"part": name, "at_s": round(time.monotonic() - started, 1), **record})

        on_cpu = "cpu" in about  # there the C++ kernels are compiled first
        limit_s = left_s if on_cpu else min(part.limit_s, left_s)
        command = ("-m", "tools.gpu.measure", *about, *part.asked)
        done[name] = parts.run(command, limit_s, on_record=said)
        said({key: value for key, value in done[name].items() if key != "records"})
        if known != (known := goals(done)):
            tell({"part": "goals", **known})
    return done


def why_not(part: Part, left_s: float) -> str:
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return f"{part.needs} is not installed"
    return f"less than {part.least_s:.0f} s were left" if left_s < part.least_s else ""


def goals(done: Mapping[str, Record]) -> Record:
    """What one request's steps should reach, as far as it is known."""
    copied = value_of(done, "ceilings", "copy_gb_per_s")
    plain, verify = (first_step(done, way) for way in (PLAIN, VERIFY))
    found: Record = {}
    if plain and copied:
        share = plain["weight_gb"] / (plain["step_ms"]["p50"] / 1e3) / copied
        found["share of the copy bandwidth, at least 0.85"] = share
        found["share of the time without work, at most 0.02"] = plain["idle_share"]
    if plain and verify:
        ratio = verify["device_ms"]["p50"] / plain["device_ms"]["p50"]
        found["a verify step over a plain one, at most 1.25"] = ratio
    return found


def first_step(done: Mapping[str, Record], name: str) -> Record | None:
    """The record of a part's smallest batch; there is one even if the part failed later."""
    records = done.get(name, {"records": []})["records"]
    return next((record for record in records if "batch" in record), None)


def value_of(done: Mapping[str, Record], name: str, field: str) -> Any:
    records = done.get(name, {"records": []})["records"]
    return next((record[field] for record in records if field in record), None)


def is_broken(done: Mapping[str, Record]) -> bool:
    """Whether a part that ran failed, or a program recompiled."""
    return any(
        part["exit_status"] or value_of(done, name, "num_recompiles") for name, part in done.items()
    )


if __name__ == "__main__":
    sys.exit(main())
