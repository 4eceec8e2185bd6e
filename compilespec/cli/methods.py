"""`compilespec methods`: the drafting methods and what each needs; TensorRT-LLM's modes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from compilespec.errors import InvalidOption

COLUMNS = ("method", "needs", "what it brings")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "methods",
        help="list the drafting methods, what each needs and what it brings",
        description="The drafting methods, those first that need no training.  By default none of "
        "them changes the output.  A drafter is looked for beside the target, then among the "
        "published ones (--drafts); `compilespec train` makes one.",
    )
    parser.add_argument(
        "--modes", action="store_true", help="list TensorRT-LLM's modes by predicate instead"
    )
    parser.add_argument(
        "--drafts", action="store_true", help="list published drafters by target instead"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON list instead of a table"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from compilespec.methods.registry import METHODS, capability_rows

    if args.modes and args.drafts:
        raise InvalidOption("--modes and --drafts are two lists: give one of them")
    if args.json:
        rows = mode_rows() if args.modes else draft_rows() if args.drafts else capability_rows()
        json.dump(rows, sys.stdout, indent=2, default=str)
        print()
    elif args.drafts:
        drafts = draft_rows()
        print_lines([tuple(drafts[0]), *(tuple(row.values()) for row in drafts)])
    elif args.modes:
        from compilespec.reference_ops.modes import truth_table

        table = ((name, ", ".join(m.name for m in modes)) for name, modes in truth_table().items())
        print_table(("predicate", "modes"), table, wraps=["modes"])
    else:
        methods = sorted((one.capabilities for one in METHODS), key=lambda c: c.needs != "nothing")
        lines = ((one.name, one.needs, one.brings) for one in methods)
        print_table(COLUMNS, lines, wraps=COLUMNS[1:])
    return 0


def draft_rows() -> list[dict[str, Any]]:
    """One row per published drafter: its target, method, name on the hub and layout."""
    from compilespec.methods.published import PUBLISHED

    return [dataclasses.asdict(row) for row in PUBLISHED]


def mode_rows() -> list[dict[str, Any]]:
    """One row per mode of TensorRT-LLM: its number, its method, its predicates."""
    from compilespec.reference_ops.modes import PREDICATES, SpecMode

    return [
        {"mode": mode.name, "value": mode.value, "method": mode.method}
        | {name: holds(mode) for name, holds in PREDICATES.items()}
        for mode in SpecMode
    ]


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, wraps: Sequence[str]
) -> None:
    """A table whose columns `wraps` wrap; the others are as wide as their contents."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column not in wraps, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_lines(rows: Sequence[Sequence[str]]) -> None:
    """Rows of columns that are as wide as they must be, on terminals of any width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())
