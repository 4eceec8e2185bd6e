"""ARCHITECTURE.md: its length, and where each row of "Where is ...?" leads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import PAGES, ROOT, table_under

PACKAGE = ROOT / "compilespec"
PAGE = "ARCHITECTURE.md"
PLACES = [
    (row[0], place)
    for row in table_under(PAGE, "you look for")
    for place in re.findall(r"`([^`]+)`", row[1])
]


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Dotted names of functions, classes, their methods and module-level values."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}{statement.name}"
            if isinstance(statement, ast.ClassDef):
                yield from _names(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (
                f"{prefix}{target.id}" for target in targets if isinstance(target, ast.Name)
            )


def _defines(path: Path, symbol: str) -> bool:
    return symbol in _names(ast.parse(path.read_text(encoding="utf-8")).body)


@pytest.mark.parametrize(("question", "place"), PLACES, ids=[place for _, place in PLACES])
def test_it_is_there(question: str, place: str) -> None:
    file, _, symbol = place.partition("::")
    path = PACKAGE / file
    if path.is_file() and (not symbol or _defines(path, symbol)):
        return
    now = [p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if _defines(p, symbol)]
    pytest.fail(
        f"{question}: {symbol} is not in {file}; it is in {', '.join(map(str, now)) or '?'}"
    )


def test_the_map_is_short_and_answers_thirty_questions() -> None:
    assert len(PAGES[PAGE].splitlines()) <= 130
    assert len(PLACES) >= 30
    assert sum("::" in place for _, place in PLACES) >= 30


@pytest.mark.parametrize("page", [PAGE, "docs/parts.md"])
def test_files_that_it_names_exist(page: str) -> None:
    known = {path.name for top in (PACKAGE, ROOT / "tests") for path in top.rglob("*.*")}
    for name in re.findall(r"`([\w/]+\.(?:py|h|cpp))\b", PAGES[page]):
        if "/" in name:
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
        else:
            assert name in known, name
