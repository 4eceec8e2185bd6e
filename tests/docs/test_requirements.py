"""docs/requirements.md and what cites it: each names the other's ids, and tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "requirements.md"
ID = re.compile(r"(?<![\w/.-])(H-\d{1,2}|[IMASE]\d{1,2}|T\d\d)(?!\w|-\w|\.\d)")
RANGE = re.compile(r"(?<![\w/.-])(H-|[IMASET])(\d{1,2})(?:-|\s+to\s+)\1(\d{1,2})(?!\w)")
ROW = re.compile(r"^\| (\S+) \| .+ \| `([\w/]+\.py)::(\w+)` \|$", re.MULTILINE)
# documents that the project does not have
ABSENT = re.compile(r"\b(DESIGN|CONVENTIONS|REQUIREMENTS|EVIDENCE|FORMATS \d)")


def sources() -> Iterator[Path]:
    for folder in ("compilespec", "tests", "tools"):
        yield from (p for p in (ROOT / folder).rglob("*.py") if p != Path(__file__).resolve())
    yield from (path for path in ROOT.glob("*.md"))


def ids_in(text: str) -> set[str]:
    """Ids, those inside of ranges such as M4-M7 too."""
    found = set(ID.findall(text))
    for kind, first, last in RANGE.findall(text):
        width = len(first) if kind == "T" else 1
        found |= {f"{kind}{number:0{width}}" for number in range(int(first), int(last) + 1)}
    return found


def test_ids_are_read() -> None:
    text = "(E5, H-16): M4-M7, T06-T08; H-21 to\n    H-23, not A100, E5-2680, T5, v1.E2 or BE2"
    expected = "E5 H-16 M4 M5 M6 M7 T06 T07 T08 H-21 H-22 H-23"
    assert ids_in(text) == set(expected.split())


def test_what_is_cited_is_defined_and_the_reverse() -> None:
    cited: dict[str, Path] = {}
    for path in sources():
        cited |= dict.fromkeys(ids_in(path.read_text(encoding="utf-8")), path)
    defined = [one for one, _, _ in ROW.findall(DOCUMENT.read_text(encoding="utf-8"))]
    assert len(defined) == len(set(defined))
    undefined = {one: path.name for one, path in cited.items() if one not in defined}
    assert not undefined, "docs/requirements.md does not define what these files cite"
    assert not set(defined) - set(cited), "nothing cites these; take them out"


def test_the_tests_that_hold_them_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| (H-|[IMASET])\d", line)]
    held = ROW.findall(text)
    assert len(held) == len(rows)
    for one, file, name in held:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), one


def test_no_document_is_cited_that_does_not_exist() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert not ABSENT.search(text), (path, ABSENT.search(text))
        for name in re.findall(r"\b[A-Z]{4,}\.md\b|\bdocs/\w+\.md\b", text):
            assert (ROOT / name).exists(), (path, name)
