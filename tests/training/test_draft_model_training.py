"""A draft model learns from the target's probabilities, and drafts for it."""

from __future__ import annotations

import json

import torch

from compilespec.training.draft_model import in_a_row
from compilespec.training.entry import train
from tests.support.training import quick_options, tiny_teacher, written_by


def test_a_draft_model_learns_and_is_measured_by_the_engine(tmp_path):
    model = tiny_teacher()
    data = written_by(model, tmp_path / "written.jsonl")
    options = quick_options(steps=30, learning_rate=0.02)
    result = train(model, data, tmp_path / "out", method="draft_model", options=options)
    lines = (tmp_path / "out" / "training" / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert result.acceptance >= 1.0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 2


def test_tokens_in_a_row():
    right = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    found = [round(float(one), 4) for one in in_a_row(right, 5)]
    assert found == [0.875, 0.6667, 0.5, 0.5, 0.0]
