"""Writes docs/families.md from the verdicts of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers

from tests.families.check import Verdict


def write_page(verdicts: Sequence[Verdict], path: Path) -> None:
    path.write_text(str(Counter(v.verdict for v in verdicts)) + transformers.__version__)
