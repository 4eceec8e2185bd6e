"""Writes docs/drafters.md, the table of published drafters: `python -m tools.list_drafters`."""

from __future__ import annotations

from pathlib import Path

from compilespec.methods.published import PUBLISHED, PublishedDraft

PAGE = Path(__file__).resolve().parents[1] / "docs" / "drafters.md"
HEAD = """# Published drafters

Drafters on the hub, by target; `compilespec drafters MODEL` lists those of one model, with what
lies beside it. Every fact is one of the linked page's; an empty field is one that was not found
there. Acceptance lengths are the authors' own, on their prompts. `python -m tools.list_drafters`
writes this page from `compilespec/methods/published.json`.

| target | drafter | method | layout | licence | acceptance | source |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page."""
    rows = sorted(PUBLISHED, key=lambda row: (row.target.casefold(), row.method))
    return HEAD + "".join(map(_line, rows))


def _line(row: PublishedDraft) -> str:
    drafter = f"[{row.draft}](https://huggingface.co/{row.draft})"
    cells = (row.target, drafter, row.method, row.layout, row.license, row.acceptance)
    return f"| {' | '.join(cells)} | [page]({row.source}) |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
