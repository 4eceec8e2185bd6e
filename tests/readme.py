"""What README.md prints, for the tests that compare it with what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def sessions() -> dict[str, str]:
    """Output by command: in fenced blocks, from a line "$ command" to the next one."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return {command: output.strip() for command, _, output in (p.partition("\n") for p in parts)}


def table_under(first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins so, without the header."""
    lines = README[README.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quotes_in(start: str) -> list[str]:
    """What the paragraph that begins with `start` sets in backticks, on one line each."""
    paragraph = README[README.index(start) :].split("\n\n")[0]
    return [" ".join(quote.split()) for quote in re.findall(r"`([^`]+)`", paragraph)]


def without_times(text: str) -> str:
    """One space between words, and a sign for each measured number: those with a point."""
    return re.sub(r"\b\d+\.\d+(e-?\d+)?", "#", " ".join(text.split()))
