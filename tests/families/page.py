"""Writes docs/families.md from the verdicts of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.families.check import (
    CAUSAL,
    CRASHED,
    EQUAL,
    NOT_BUILT,
    REFUSED,
    WITH_IMAGES,
    WRONG,
    Verdict,
)

_HEAD = """\
# Families of transformers

`make families` makes a tiny random model of every class that `AutoModelForCausalLM` knows, and of
every other one that `AutoModelForImageTextToText` knows, and compares their tokens for text and
their log-probabilities with those of the engine. The reference is the
module itself: the whole sequence computed anew for each token, without a cache. The engine runs
with drafts (`spec="ngram"`), prompts of 13, 29 and 21 tokens in pieces of 16, a request that joins
when another one ends, and few cache blocks, so that one is preempted. Windows, chunks and
selections of keys are shorter than the prompts; biases, soft caps, scales and another rotary table
are on where a family has them.

This page is written by that command. Refused means: an error of one line, which names the reason,
before anything runs. Not built means: the tiny model of that class does not run by itself.
"""


_TITLES = {
    CAUSAL: "Causal language models",
    WITH_IMAGES: "Models of images and text, given text alone",
}
_ORDER = (EQUAL, REFUSED, NOT_BUILT, WRONG, CRASHED)


def write_page(verdicts: Sequence[Verdict], versions: str, path: Path) -> None:
    """Write the page: for each auto class the counts, and a row for each family.

    Args:
        versions: of transformers and torch, in words.
    """
    lines = [_HEAD, f"{versions}."]
    for auto, title in _TITLES.items():
        lines += ["", f"## {title}", "", *_table([one for one in verdicts if one.auto == auto])]
    path.write_text("\n".join(lines) + "\n")


def _table(verdicts: Sequence[Verdict]) -> list[str]:
    counts = Counter(verdict.verdict for verdict in verdicts)
    said = ", ".join(f"{counts[name]} {name}" for name in _ORDER)
    lines = [f"{said}.", "", "| family | class | verdict | reason |", "|---|---|---|---|"]
    by_verdict = sorted(verdicts, key=lambda one: (_ORDER.index(one.verdict), one.family))
    for one in by_verdict:
        reason = one.reason.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {one.family} | {one.class_name} | {one.verdict} | {reason} |")
    return lines
