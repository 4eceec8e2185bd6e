"""spec="auto": measured candidates, a reasoned choice, tokens of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import compilespec
from compilespec.errors import InvalidOption
from compilespec.pipeline import auto as choosing
from tests.support.models import ask_all, tiny_target


def test_a_drafter_that_is_right_is_picked_and_the_reasons_are_given(tmp_path):
    """One small layer drafts for five: the same model twice would cost as much as it saves."""
    model = tiny_target("llama", num_layers=6)
    model.save_pretrained(tmp_path)
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:1]
    small.config.num_hidden_layers = 1
    small.save_pretrained(tmp_path / "draft_model")
    asks = ask_all(model, ((9, 20), (3, 12)))
    with compilespec.compile(
        str(tmp_path), spec="auto", backend="eager", dtype="float64", max_batch_size=2,
        max_seq_len=64,
    ) as engine:  # fmt: skip
        plan = engine.plan()
        why = [line for line in plan["why"] if line.startswith(("auto", "ngram", "draft_model"))]
        assert why[0].startswith("auto picked ")
        assert sum(line.startswith("draft_model K=") for line in why) == 4
        assert sum(line.startswith("ngram K=") for line in why) == 4
        assert any(line.startswith("auto left out eagle3: no drafter") for line in why)
        assert f"{plan['method']}" in why[0]
        for ask in asks:
            params = compilespec.SamplingParams(max_new_tokens=len(ask.tokens), ignore_eos=True)
            (output,) = engine.generate(list(ask.prompt), params)
            assert output.token_ids == list(ask.tokens)


def test_a_given_k_is_kept():
    model = tiny_target("llama", num_layers=2)
    program = compilespec.trace(model, spec="AUTO", num_draft_tokens=2, max_seq_len=64)
    assert program.config.num_draft_tokens in (0, 2)
    assert any("ngram K=2" in note for note in program.notes)
    assert not any("K=3" in note for note in program.notes)


@pytest.mark.parametrize(
    ("emitted", "given", "method", "counts"),
    [
        (3, (0, 2), "suffix", (0, 2)),
        (1, (0, 2), "suffix", (0, 2)),  # nothing is lost where a step may draft nothing
        (1, None, "suffix", (0, 2, 4, 8)),
        (1, (1, 2), "none", (0,)),
    ],
)
def test_drafts_that_do_not_pay_are_taken_where_steps_may_leave_them(
    monkeypatch, emitted, given, method, counts
):
    measured = choosing._emitted_per_step

    def measure(*args: Any) -> list[int]:
        return [emitted for _ in measured(*args)]

    monkeypatch.setattr(choosing, "_emitted_per_step", measure)
    model = tiny_target("llama", num_layers=2)
    program = compilespec.trace(model, spec="auto", num_draft_tokens=given, max_seq_len=64)
    assert program.method == method
    assert program.graphs.draft_counts == counts
    if given == (0, 2):
        named = [note.split(":")[0] for note in program.notes if note.startswith("ngram K=")]
        assert named == ["ngram K=2"]


def test_a_draft_or_options_contradict_it():
    model = tiny_target("llama", num_layers=2)
    with pytest.raises(InvalidOption, match="name the method"):
        compilespec.trace(model, spec="auto", draft="somewhere")
