"""`compilespec methods`: the drafting methods and what each needs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

# Columns of the table and the capabilities they show; a method that is not built has only a name.
COLUMNS = {
    "method": "name",
    "built": "built",
    "kind": "kind",
    "draft weights": "needs_draft_weights",
    "aux hidden": "reads_hidden_states",
    "own KV cache": "own_kv_cache",
    "lossless": "lossless",
    "also known as": "aliases",
}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "methods", help="list the drafting methods and what each needs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON list instead of a table"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from compilespec.methods import capability_rows

    rows = capability_rows()
    if args.json:
        json.dump(rows, sys.stdout, indent=2, default=str)
        print()
        return 0

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=column == "method", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in COLUMNS.values()))
    Console().print(table)
    return 0


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return str(value)
