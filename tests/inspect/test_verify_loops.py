"""Every kind of draft loop against its reference, which drives the drafter from outside (T30)."""

from __future__ import annotations

import pytest

import compilespec
from tests.support.loops import KINDS, traced

SLOW = ("module_rows", "target_rows", "ngram", "suffix")
CASES = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]


@pytest.mark.parametrize("kind", CASES)
def test_the_loop_computes_what_its_reference_does(kind: str) -> None:
    report = compilespec.verify(traced(kind), passes=["splice_draft_loop", "commit_state"])
    assert report.ok, str(report)
    phases = {(check.phase, check.pass_name) for check in report.checks}
    assert ("decode", "splice_draft_loop") in phases
    assert ("prefill", "splice_draft_loop") in phases
