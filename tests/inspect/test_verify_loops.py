"""Every kind of draft loop against its reference, which drives the drafter from outside (T30)."""

from __future__ import annotations

import pytest

import compilespec
from tests.support.loops import KINDS, SIZES, traced
from tests.support.models import tiny_target

SLOW = ("module_rows", "target_rows", "ngram", "suffix")
CASES = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]


@pytest.mark.parametrize("kind", CASES)
def test_the_loop_computes_what_its_reference_does(kind: str) -> None:
    report = compilespec.verify(traced(kind), passes=["splice_draft_loop", "commit_state"])
    assert report.ok, str(report)
    phases = {(check.phase, check.pass_name) for check in report.checks}
    assert ("decode", "splice_draft_loop") in phases
    assert ("prefill", "splice_draft_loop") in phases


@pytest.mark.parametrize("draft", ["qwen2", "pard"])
def test_a_draft_model_catches_up_as_its_reference_does(draft: str) -> None:
    """Steps of K = 0 keep the tokens that a replay gives it."""
    model = tiny_target("qwen2", num_layers=1, seed=1)
    if draft == "pard":
        model.config.pard_token = 96
    options = {**SIZES, "num_draft_tokens": (0, 3)}
    program = compilespec.trace(
        tiny_target("llama", num_layers=2), spec="draft_model", draft=model, **options
    )
    report = compilespec.verify(program, passes=["splice_draft_loop", "read_kept", "commit_drafts"])
    assert report.ok, str(report)
    assert {"read_kept", "commit_drafts"} <= {check.pass_name for check in report.checks}
