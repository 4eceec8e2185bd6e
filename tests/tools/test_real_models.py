"""SmolLM2 from a Python package: its conversion is checked, and it answers through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import compilespec
from compilespec import SamplingParams
from tools import real_models
from tools.real_models import ANSWER, QUESTION, SMOLLM2, TENSORS_SHA256, check, tensors_digest

MESSAGES = [{"role": "user", "content": QUESTION}]


def test_the_digest_tells_names_shapes_and_values(tmp_path):
    def digest(**tensors: torch.Tensor) -> str:
        save_file(tensors, tmp_path / "x.safetensors")
        return tensors_digest(tmp_path / "x.safetensors")

    one, two = torch.arange(6.0, dtype=torch.bfloat16), torch.ones(3)
    known = digest(a=one, b=two)
    assert digest(b=two, a=one) == known
    others = (
        {"a": one, "c": two}, {"a": one.reshape(2, 3), "b": two}, {"a": one + 1, "b": two},
        {"a": one.half(), "b": two}, {"a": one},
    )  # fmt: skip
    assert len({known, *(digest(**tensors) for tensors in others)}) == 1 + len(others)


def test_a_wrong_answer_leaves_no_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"the answer: expected 'x', got 'y'; remove"):
        check("the answer", "y", "x")

    class Nothing:
        def save_pretrained(self, directory: Path) -> None:
            save_file({"a": torch.ones(1)}, directory / "model.safetensors")

    class Target:
        model: Any = Nothing()
        tokenizer: Any = Nothing()

    monkeypatch.setattr("compilespec.tracing.load.load_target", lambda *a, **k: Target())
    with pytest.raises(SystemExit, match="the weights"):
        real_models.convert(tmp_path / "x.gguf", tmp_path / "models" / "made")
    assert not (tmp_path / "models" / "made").exists()


@pytest.mark.real
def test_the_checkpoint_is_the_known_one():
    assert tensors_digest(SMOLLM2 / "model.safetensors") == TENSORS_SHA256


@pytest.mark.real
@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_it_answers_a_question(spec):
    keywords: dict[str, Any] = {"backend": "eager", "max_batch_size": 1, "max_seq_len": 256}
    with compilespec.compile(SMOLLM2, spec, **keywords) as engine:
        (output,) = engine.chat(MESSAGES, SamplingParams(max_new_tokens=16))
    assert output.text == ANSWER
    assert output.finish_reason == "stop"
