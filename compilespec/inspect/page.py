"""All stages of a phase as one HTML page that needs no network: `page.html` with the data in it."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from compilespec.inspect.graphs import GraphStage
from compilespec.inspect.table import Row


def render_page(
    stages: Sequence[tuple[GraphStage, Sequence[Row]]], title: str, *, show: str | None = None
) -> str:
    """The page: the pipeline as a list, any two stages side by side, folding by module, search.

    Args:
        show: the pass that the page opens at; None for the first one that changes something.
    """
    numbers: dict[Row, int] = {}  # a row that stages share is written once
    listed = [
        {
            "name": stage.name,
            "record": _record(stage),
            "rows": [numbers.setdefault(row, len(numbers)) for row in rows],
        }
        for stage, rows in stages
    ]
    data = {
        "title": title,
        "show": show,
        "stages": listed,
        "rows": [_cells(row) for row in numbers],
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    template = files("compilespec.inspect").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("@TITLE@", html.escape(title)).replace("@DATA@", text)


def _record(stage: GraphStage) -> dict[str, Any] | None:
    record = stage.record
    if record is None:
        return None
    wanted = ("level", "matches", "nodes_before", "nodes_after", "elapsed_ms", "numerics")
    return {name: getattr(record, name) for name in wanted}


def _cells(row: Row) -> dict[str, Any]:
    cells = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    del cells["shape"], cells["dtype"]
    cells |= {"value": row.value, "place": row.place}
    return {name: value for name, value in cells.items() if value}
