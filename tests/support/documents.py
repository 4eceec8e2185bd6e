"""What README.md and the pages of docs/ print, for the tests that compare it with what the commands
print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        *sorted(ROOT.glob("*.md")),
        ROOT / "examples" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}


def sessions(page: str) -> Iterator[tuple[str, str]]:
    """Commands and their output: in fenced blocks, from a line "$ command" to the next one."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output.strip()


def table_under(page: str, first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins so, without the header."""
    text = PAGES[page]
    lines = text[text.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def paragraph(page: str, start: str) -> str:
    """The paragraph that begins with `start`."""
    text = PAGES[page]
    return text[text.index(start) :].split("\n\n")[0]


def quotes_in(page: str, start: str) -> list[str]:
    """What the paragraph that begins with `start` sets in backticks, on one line each."""
    return [" ".join(quote.split()) for quote in re.findall(r"`([^`]+)`", paragraph(page, start))]


def without_times(text: str) -> str:
    """One space between words, and a sign for each measured number: those with a point."""
    return re.sub(r"\b\d+\.\d+(e-?\d+)?", "#", " ".join(text.split()))
