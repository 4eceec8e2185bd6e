"""Trained MTP modules: their unrolled steps are those that the engine's drafter computes."""

from __future__ import annotations

import json

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption
from compilespec.tracing.load import load_target
from compilespec.training.batches import make_batch, make_lesson
from compilespec.training.data import Sample
from compilespec.training.entry import train
from compilespec.training.mtp import MtpEagleTraining, MtpTraining, unroll
from compilespec.training.teacher import Teacher
from tests.support.training import quick_options, tiny_teacher, written_by


def test_every_draft_step_is_what_the_drafter_itself_computes():
    teacher, method = Teacher(load_target(tiny_teacher())), MtpEagleTraining()
    vocab = teacher.info.vocab_size
    drafter = method.create(teacher.info, torch.ones(vocab), quick_options())
    teacher.tap(method.aux_layers(drafter))
    rng = torch.Generator().manual_seed(1)
    batch = make_batch(
        [
            Sample(token_ids=tuple(torch.randint(vocab, (n,), generator=rng).tolist()), start=s)
            for n, s in ((13, 4), (9, 1))
        ]
    )
    lesson = make_lesson(teacher, batch, None, depth=3)
    with torch.no_grad():
        steps = list(unroll(list(drafter.steps), lesson.aux, batch, 3))
        for row in range(2):
            for number, origin in enumerate(batch.origins[row].tolist()):
                rows = lesson.aux[row : row + 1, : origin + 1]
                for step in range(3):
                    if origin + 1 + step >= int(batch.lengths[row]):
                        break
                    ids = batch.ids[row : row + 1, 1 : origin + 2 + step]
                    head_input, recycled = drafter(ids, torch.arange(ids.shape[1])[None], rows)
                    got = steps[step][row, number]
                    torch.testing.assert_close(got, head_input[0, -1], rtol=1e-4, atol=1e-4)
                    rows = torch.cat([rows, recycled[:, -1:]], 1)


@pytest.mark.parametrize("method", ["mtp", "mtp_eagle"])
def test_training_lowers_the_loss_and_the_modules_draft_in_the_engine(method, tmp_path):
    model = tiny_teacher()
    data = written_by(model, tmp_path / "written.jsonl")
    options = quick_options(steps=40, eval_every=40, learning_rate=0.02)
    result = train(model, data, tmp_path / "out", method=method, options=options)
    log = [json.loads(line) for line in (tmp_path / "out/training/log.jsonl").open()]
    assert sum(r["loss"] for r in log[-5:]) < 0.9 * sum(r["loss"] for r in log[:5])
    assert result.acceptance > 1
    texts = []
    for spec in ({"spec": method, "draft": tmp_path / "out"}, {"spec": "none"}):
        with compilespec.compile(model, backend="eager", **spec) as engine:
            (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=12))
            texts.append(output.token_ids)
    assert texts[0] == texts[1]


def test_a_chain_of_modules_is_as_long_as_its_drafts():
    info = Teacher(load_target(tiny_teacher())).info
    options = quick_options(depth=2, num_draft_tokens=3)
    with pytest.raises(InvalidOption, match="one token a module: num_draft_tokens must be at most"):
        MtpTraining().create(info, torch.ones(info.vocab_size), options)
