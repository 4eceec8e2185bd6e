"""One part, in this process: a line of JSON a record; without a part, all of `prove.PARTS`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from tools.bench import report
from tools.without_gpu.prove import PARTS, prove


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.without_gpu", description=__doc__)
    parts = parser.add_subparsers(dest="part")
    some = parts.add_parser("prove", help="some of the proofs, by name; without a part, all")
    some.add_argument("names", nargs="+", choices=PARTS)
    steps = parts.add_parser("steps", help="compile the steps of a program at real size")
    steps.add_argument("shape")
    steps.add_argument("--arch", default="sm_90")
    steps.add_argument("--layers", type=int, default=2)
    steps.add_argument("--spec", default="none")
    steps.add_argument("--num-draft-tokens", type=int, nargs="+")
    steps.add_argument("--only", metavar="STEP", help="such as decode.0.greedy")
    steps.add_argument("--plain", action="store_true", help="without the passes for speed")
    steps.add_argument("--pieces", action="store_true", help="between attention calls")
    quantized = parts.add_parser("quantized", help="the products of a quantized step")
    quantized.add_argument("names", nargs="*")
    return parser.parse_args(arguments)


def records(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.part == "quantized":
        from tools.without_gpu.quantized import NAMES, quantized_step

        yield from map(quantized_step, options.names or NAMES)
        return
    from tools.gpu.models import SHAPES
    from tools.without_gpu import programs

    keywords = {}
    if options.num_draft_tokens:
        counts = tuple(options.num_draft_tokens)
        keywords["num_draft_tokens"] = counts if len(counts) > 1 else counts[0]
    program = programs.real_program(
        options.shape,
        spec=options.spec,
        layers=options.layers,
        optimised=not options.plain,
        **keywords,
    )
    if options.pieces:
        yield from programs.proven_pieces(program, options.arch, options.only)
        return
    depth = SHAPES[options.shape].config["num_hidden_layers"]
    for record in programs.proven_steps(program, options.arch, depth, options.only):
        yield {**record, "faults": []} if options.plain else record  # nothing is claimed of it


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.part in (None, "prove"):
        return prove(report.RESULTS_DIR / "without-gpu.json", getattr(options, "names", ()))
    for record in records(options):
        print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
