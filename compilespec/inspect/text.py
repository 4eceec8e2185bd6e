"""Tables for people: coloured and paged on a terminal, plain columns anywhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from compilespec.inspect.graphs import GraphStage
from compilespec.inspect.table import Change, Row
from compilespec.program import PassRecord

_STYLES = {"+": "green", "-": "red", "~": "yellow", "exact": "green", "rounding": "yellow"}
_COLUMN_STYLES = {"name": "bold", "target": "cyan", "value": "magenta", "source": "dim"}
_MAX_NAME, _MAX_TARGET = 40, 64  # `--json` has all of it


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A title, the names of the columns, and cells; numbers stand right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]

    def lines(self) -> Iterable[str]:
        """Plain text, columns as wide as they need."""
        cells = [list(self.columns), *(list(map(_text, row)) for row in self.rows)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(self.columns))]
        is_number = [
            bool(self.rows) and all(not isinstance(row[index], str) for row in self.rows)
            for index in range(len(self.columns))
        ]
        yield self.title
        for row in cells:
            aligned = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, is_number, strict=True)
            ]
            yield "  ".join(aligned).rstrip()

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", box=None, pad_edge=False)
        for index, column in enumerate(self.columns):
            right = bool(self.rows) and not isinstance(self.rows[0][index], str)
            table.add_column(
                column, justify="right" if right else "left", no_wrap=True,
                style=_COLUMN_STYLES.get(column),
            )  # fmt: skip
        for row in self.rows:
            style = _STYLES.get(str(row[0])) if self.columns[0] == "" else None
            table.add_row(
                *(Text(_text(cell), style=_STYLES.get(_text(cell), "")) for cell in row),
                style=style,
            )
        return table


def node_table(title: str, rows: Sequence[Row]) -> TextTable:
    columns = ("name", "op", "target", "value", "module", "pass", "source")
    return TextTable(title=title, columns=columns, rows=[_node_cells(row) for row in rows])


def change_table(title: str, changes: Iterable[Change]) -> TextTable:
    """A table of changes: "+" for added rows, "-" for removed ones, both for changed ones."""
    cells = []
    for change in changes:
        for sign, row in (("-", change.old), ("+", change.new)):
            if row is not None:
                cells.append(("~" if change.sign == "~" else sign, *_node_cells(row)))
    columns = ("", "name", "op", "target", "value", "module", "pass", "source")
    return TextTable(title=title, columns=columns, rows=cells)


def pass_table(title: str, records: Sequence[PassRecord]) -> TextTable:
    columns = ("pass", "level", "matches", "before", "after", "ms", "numerics")
    rows = [
        (r.name, r.level, r.matches, r.nodes_before, r.nodes_after, r.elapsed_ms, r.numerics)
        for r in records
    ]
    return TextTable(title=title, columns=columns, rows=rows)


def operator_table(title: str, counts: Mapping[str, Mapping[str, int]]) -> TextTable:
    """A row an operator, a column a stage; most frequent in the last stage first."""
    last = list(counts.values())[-1]
    names = dict.fromkeys(name for one in (last, *counts.values()) for name in one)
    rows: list[list[str | int]] = [
        [name, *(one.get(name, 0) for one in counts.values())] for name in names
    ]
    totals: list[str | int] = ["all", *(sum(one.values()) for one in counts.values())]
    return TextTable(title=title, columns=("operator", *counts), rows=[*rows, totals])


def stage_title(stage: GraphStage, phase: str) -> str:
    if phase.split(".")[0] in ("target", "draft"):
        return f"{stage.name}, as captured"
    return f"{phase} at the start" if stage.record is None else f"{phase} after {stage.name}"


def write(out: TextIO, parts: Sequence[Any]) -> None:
    """Tables, reports and strings: through a pager on a terminal, as plain text anywhere else."""
    if out.isatty():
        from rich.console import Console

        os.environ.setdefault("LESS", "-RFSX")  # colours, no pager for short output, no folding
        console = Console(file=out)
        with console.pager(styles=True):
            for part in parts:
                console.print(part)
        return
    for part in parts:
        lines = part.lines() if isinstance(part, TextTable) else [str(part)]
        for line in lines:
            out.write(line + "\n")


def write_json(out: TextIO, data: Any) -> None:
    json.dump(data, out, indent=1, default=str)
    out.write("\n")


def _node_cells(row: Row) -> tuple[str, ...]:
    if row.op in ("input", "output"):
        target = row.role or row.target
    else:
        target = f"{row.target}({row.args})"
    name, code = _short(row.name, _MAX_NAME), _short(target, _MAX_TARGET)
    return (name, row.op, code, row.value, row.place, row.made_by, row.source)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _text(cell: str | int | float) -> str:
    return f"{cell:.1f}" if isinstance(cell, float) else str(cell)
