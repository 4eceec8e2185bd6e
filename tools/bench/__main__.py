"""`python -m tools.bench`: parse the options, run one of the benchmarks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--first-token", action="store_true", help="seconds to first token of fresh processes"
    )
    mode.add_argument("--load", action="store_true", help="minutes of load on the demo")
    mode.add_argument("--serving", action="store_true", help="what HTTP costs, against the engine")
    parser.add_argument("--minutes", type=float, default=10, help="minutes of --load")
    parser.add_argument("--model", default="demo", help="a checkpoint directory, or demo")
    parser.add_argument(
        "--draft", type=Path, help="the drafter's directory (default: looked for beside the target)"
    )
    parser.add_argument("--dtype", help="dtype instead of the model's own, such as float32")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[1, 3, 5], metavar="K")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="how often each prompt is timed")
    parser.add_argument("--repeats", type=int, default=3, help="warm starts of --first-token")
    parser.add_argument("--cold-repeats", type=int, default=1, help="cold starts of it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="only ways whose name contains this (gates may go unjudged)")
    parser.add_argument("--name", help="results/NAME.json (default: the kind of benchmark)")
    options = parser.parse_args(arguments)
    if options.name is None:
        kinds = {
            "first-token": options.first_token,
            "load": options.load,
            "serving": options.serving,
        }
        options.name = next((kind for kind, chosen in kinds.items() if chosen), "speed")
    if options.dtype and options.model == "demo":
        parser.error("--dtype: the demo pair is measured in its own dtype")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    # Both OpenMP and torch's pool read it at import.
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    console = Console(width=None if sys.stdout.isatty() else 140)
    if os.getloadavg()[0] > 0.5:
        console.print(
            f"[yellow]the machine is busy (load {os.getloadavg()[0]:.1f}): threads that wait for "
            "each other on shared cores make every number meaningless[/]"
        )
    if options.first_token:
        from tools.bench.first_token import run
    elif options.load:
        from tools.bench.load import run
    elif options.serving:
        from tools.bench.serving import run
    else:
        from tools.bench.speed import run
    return run(options, console)


if __name__ == "__main__":
    sys.exit(main())
