"""`compilespec compile`: fills the artifact cache, so that later starts compile nothing."""

from __future__ import annotations

import argparse
import time
from typing import Any

from compilespec.cli import report
from compilespec.cli.flags import add_engine_options, compile_keywords
from compilespec.cli.generate import DEMO, print_json, set_threads, spec_of

UNUSED = ("backend", "tensor_parallel_size", "draft_tensor_parallel_size")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile",
        help="fill the artifact cache ahead of time",
        description="Compile a model and a drafter as compile() would, and keep the artifacts.  A "
        "later start with the same model, options, torch and compilespec compiles nothing.  The "
        "cache is COMPILESPEC_CACHE_DIR, else ~/.cache/compilespec.",
    )
    add_engine_options(parser, default=DEMO, without=UNUSED)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    import compilespec
    from compilespec.cudagraphs.modes import read_graph_options, units_for
    from compilespec.lowering import check_compiler, lower
    from compilespec.ops._build import cache_directory
    from compilespec.progress import reporting
    from compilespec.tracing.placement import read_device

    graphs = read_graph_options(args.cudagraphs or "auto")
    check_compiler("inductor", read_device(args.device) or torch.device("cpu"))
    set_threads(args.threads)
    started = time.perf_counter()
    spec = spec_of(args)
    given = compile_keywords(args, spec)
    with report.starting(f"{args.model} (spec={spec})", quiet=args.json) as progress:
        program = compilespec.trace(args.model, spec, keep_graphs=False, progress=progress, **given)
        traced_s = time.perf_counter() - started
        kinds = graphs.kinds_on(program.config.device)
        with reporting(progress) as reporter:
            lowered = lower(program, units=units_for(kinds), progress=reporter)
    result = {
        "model": str(args.model),
        "method": program.method,
        "directory": str(cache_directory()),
        "trace_s": traced_s,
        "total_s": time.perf_counter() - started,
        "phases": lowered.costs(),
    }
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']}, {result['method']}: {result['total_s']:.1f} s in all")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("compiled as")
    table.add_column("")
    table.add_row("(trace and rewrite)", f"{result['trace_s']:.1f}", "", "")
    for name, phase in result["phases"].items():
        unit = "whole" if phase["pieces"] is None else f"{phase['pieces']} distinct pieces"
        source = "was in the cache" if phase["from_cache"] else "compiled"
        table.add_row(name, f"{phase['seconds']:.1f}", unit, source)
    Console().print(table)
    Console().print(f"artifacts: {result['directory']}", highlight=False, soft_wrap=True)
