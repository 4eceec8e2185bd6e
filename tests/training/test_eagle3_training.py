"""The training-time test is what the engine's drafter computes, and training makes it better."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.tracing.load import load_target
from compilespec.training.batches import make_batch, make_lesson
from compilespec.training.data import Sample
from compilespec.training.eagle3 import Eagle3Training
from compilespec.training.entry import train
from compilespec.training.teacher import Teacher
from tests.support.models import tiny_target
from tests.support.training import quick_options, tiny_teacher, written_by


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_teacher()


@pytest.fixture(scope="module")
def data(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(model, tmp_path_factory.mktemp("data") / "written.jsonl")


@pytest.fixture(scope="module")
def lesson_parts(model: Any) -> tuple[Teacher, Any, Any, Any]:
    """A teacher, a method, its head with a reduced vocabulary, and a batch of unequal lengths."""
    teacher, method = Teacher(load_target(model)), Eagle3Training()
    vocab = teacher.info.vocab_size
    counts = torch.arange(vocab) % 11
    head = method.create(teacher.info, counts, quick_options(draft_vocab_size=vocab // 2))
    teacher.tap(method.aux_layers(head))
    rng = torch.Generator().manual_seed(1)
    batch = make_batch(
        [
            Sample(token_ids=tuple(torch.randint(vocab, (n,), generator=rng).tolist()), start=s)
            for n, s in ((13, 4), (9, 1), (17, 7))
        ]
    )
    return teacher, method, head, batch


def test_a_teacher_has_the_models_hidden_states_and_probabilities(model, lesson_parts):
    teacher, method, head, batch = lesson_parts
    ids = method.draft_ids(head)
    lesson = make_lesson(teacher, batch, ids, depth=3)
    with torch.no_grad():
        want = model(batch.ids, output_hidden_states=True)
    layers = method.aux_layers(head)
    aux = torch.cat([want.hidden_states[layer] for layer in layers], -1)
    torch.testing.assert_close(lesson.aux, aux, rtol=1e-4, atol=1e-4)
    for row, start in enumerate((4, 1, 7)):
        for place in range(3):
            logits = want.logits[row, start + place]
            torch.testing.assert_close(
                lesson.probs[row, place], logits.softmax(-1)[ids], rtol=1e-3, atol=1e-5
            )
            assert lesson.best[row, place] == logits.argmax()


def test_every_draft_step_is_what_the_drafter_itself_computes(lesson_parts):
    """Row by row, with the true rows before it and its own output after."""
    teacher, method, head, batch = lesson_parts
    lesson = make_lesson(teacher, batch, method.draft_ids(head), depth=3)
    with torch.no_grad():
        hidden_by_step = method._unroll(head, lesson.aux, batch, 3)
        for row in range(3):
            combined = head.combine(lesson.aux[row : row + 1])
            for number, origin in enumerate(batch.origins[row].tolist()):
                rows = combined[:, : origin + 1]
                for step in range(3):
                    if origin + 1 + step >= int(batch.lengths[row]):
                        break
                    ids = batch.ids[row : row + 1, 1 : origin + 2 + step]
                    positions = torch.arange(origin + 1 + step)[None]
                    _, recycled = head(ids, positions, rows)
                    got = hidden_by_step[step][row, number]
                    torch.testing.assert_close(got, recycled[0, -1], rtol=1e-4, atol=1e-4)
                    rows = torch.cat([rows, recycled[:, -1:]], 1)


def test_compiled_draft_steps_give_the_same(lesson_parts, monkeypatch):
    """Dynamo traces them for sizes that are not known; Inductor's kernels would only round
    otherwise.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    teacher, method, head, batch = lesson_parts
    lesson = make_lesson(teacher, batch, method.draft_ids(head), depth=3)
    compiled = Eagle3Training()
    compiled.compile_steps()
    want, got = (one._unroll(head, lesson.aux, batch, 3) for one in (method, compiled))
    torch.testing.assert_close(got, want)


def test_losses_leave_out_what_was_given_and_what_is_padding(lesson_parts):
    """Only the written tokens count: others may change without changing a loss."""
    teacher, method, head, batch = lesson_parts
    lesson = make_lesson(teacher, batch, method.draft_ids(head), depth=2)
    with torch.no_grad():
        before = method.losses(head, lesson, 2).losses
        outside = lesson.probs.clone()
        for row in range(3):
            for place in range(outside.shape[1]):
                # Row `place` is about the token at first origin + 2 + place.
                if int(batch.origins[row, 0]) + 2 + place >= int(batch.lengths[row]):
                    outside[row, place] = 7.0
        changed = type(lesson)(batch=batch, aux=lesson.aux, probs=outside, best=lesson.best)
        after = method.losses(head, changed, 2).losses
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_training_lowers_the_loss_and_the_head_drafts_in_the_engine(model, data, tmp_path):
    result = train(
        model, data, tmp_path, options=quick_options(steps=40, eval_every=20, learning_rate=0.02)
    )
    log = [json.loads(x) for x in (tmp_path / "training" / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log] == list(range(40))
    assert sum(r["loss"] for r in log[-5:]) < 0.9 * sum(r["loss"] for r in log[:5])
    measured = [r["acceptance"]["overall"] for r in log if "acceptance" in r]
    assert len(measured) == 2
    assert result.acceptance == pytest.approx(max(measured), rel=1e-5)
    assert set(log[-1]["acceptance"]["by_domain"]) == {"odd", "even"}
    prompt = [5, 6, 7]
    with compilespec.compile(model, "eagle3", draft=tmp_path, backend="eager") as engine:
        (drafted,) = engine.generate([prompt], SamplingParams(max_new_tokens=12))
    with compilespec.compile(model, "none", backend="eager") as engine:
        (plain,) = engine.generate([prompt], SamplingParams(max_new_tokens=12))
    assert drafted.token_ids == plain.token_ids
    for name in ("metrics.csv", "loss.svg", "acceptance.svg"):
        assert (tmp_path / "training" / name).stat().st_size > 100
    assert f"**{result.acceptance:.2f}**" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_both_layouts_load_with_a_reduced_vocabulary(data, tmp_path, layout):
    model = tiny_target("llama", torch.float32, num_layers=3)
    model.config._name_or_path, model.config.architectures = "org/tiny", ["LlamaForCausalLM"]
    vocab = model.config.vocab_size
    options = quick_options(steps=2, layout=layout, draft_vocab_size=vocab // 3)
    train(model, data, tmp_path, options=options)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert ("speculators_model_type" in raw) == (layout == "speculators")
    assert raw["draft_vocab_size"] == vocab // 3
    if layout == "speculators":  # whose library loads the target's embedding by this name
        verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/tiny"}
        assert raw["speculators_config"]["verifier"] == verifier
    with compilespec.compile(model, "eagle3", draft=tmp_path, backend="eager") as engine:
        (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))
    assert len(output.token_ids) == 4
