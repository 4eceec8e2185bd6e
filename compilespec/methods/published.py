"""Drafters that others have published on the hub, by the target that they were trained for.

`published.json` has one row a drafter; its facts are those of the page `source`, and "" stands for
unknown ones.  Loading a drafter checks its sizes against the target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PublishedDraft:
    """A drafter of the hub."""

    target: str
    """Its target, as org/name."""
    draft: str
    """Its own name, as org/name."""
    method: str
    """The method that drafts with it; some are not built yet."""
    layout: str
    """The layout of its checkpoint (docs/methods.md)."""
    license: str
    """Its licence."""
    acceptance: str
    """The acceptance length that its authors measured, with K where they say it."""
    source: str
    """The page that says so."""


FILE = Path(__file__).with_suffix(".json")

# Of several for one target and method the first is taken.
PUBLISHED: tuple[PublishedDraft, ...] = tuple(
    PublishedDraft(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))
)


def published_for(target_name: str | None) -> list[PublishedDraft]:
    """The drafters of a target.

    Args:
        target_name: "org/name", with or without a revision, or the name of a directory, which is
            compared with the names alone.  Case does not count.
    """
    name = (target_name or "").partition("@")[0].casefold()
    known = [(row, row.target.casefold()) for row in PUBLISHED]
    return [row for row, own in known if name in (own, own.partition("/")[2])]


def published_draft(target_name: str | None, method: str) -> str | None:
    """The hub's name of a drafter for a target and a method; None where none is known."""
    return next((row.draft for row in published_for(target_name) if row.method == method), None)
