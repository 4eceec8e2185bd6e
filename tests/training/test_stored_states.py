"""Hidden states on disk: the same lessons, and the target runs once a sequence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, InvalidOption
from compilespec.methods.capabilities import FINAL_NORM
from compilespec.tracing.load import load_target
from compilespec.training import trainer
from compilespec.training.data import Sample
from compilespec.training.entry import train
from compilespec.training.stored_states import KeptStates, RecordedStates
from compilespec.training.teacher import Said, States, Teacher
from tests.support.training import quick_options, tiny_teacher, written_by

AUX = (2, 3, 4)
SAMPLES = (
    Sample(token_ids=(1, 2, 3, 4, 5), start=2),
    Sample(token_ids=(7, 8, 9), start=1),
    Sample(token_ids=(5, 4, 3, 2, 1, 6, 7), start=3),
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_teacher()


@pytest.fixture(scope="module")
def teacher(model: Any) -> Teacher:
    made = Teacher(load_target(model))
    made.tap(AUX)
    return made


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trainer.MeasuredAcceptance(overall=1.5, by_domain={}, num_prompts=1, num_steps=1)
    monkeypatch.setattr(trainer, "measure", lambda *args: found)


def opened(folder: Path, teacher: Teacher) -> KeptStates:
    store = KeptStates(folder)
    store.open(teacher, AUX)
    return store


def first_two(states: States) -> States:
    """Of the sequences."""
    aux, hidden, said = states
    assert said is not None
    return States(aux[:2], hidden[:2], Said(*(column[:2] for column in said)))


def same(one: Any, other: Any) -> bool:
    """Whether two `States` are equal to the bit."""
    pairs = zip((*one[:2], *one[2]), (*other[:2], *other[2]), strict=True)
    return all(mine.equal(theirs) for mine, theirs in pairs)


def test_kept_states_are_the_teachers_in_bfloat16(teacher, tmp_path, monkeypatch):
    store = opened(tmp_path, teacher)
    store.of(SAMPLES[:2])
    aux, last, said = store.of(SAMPLES)  # two known, one new
    for row, sample in enumerate(SAMPLES):
        alone = teacher.states(torch.tensor([sample.token_ids]))[:2]
        for found, expected in zip((aux, last), alone, strict=True):
            mine = found[row, : len(sample)]
            torch.testing.assert_close(mine, expected[0].bfloat16().float(), rtol=2**-7, atol=1e-6)
            assert not found[row, len(sample) :].any()
    monkeypatch.setattr(teacher, "states", None)  # a call would raise
    again = opened(tmp_path, teacher).of(SAMPLES)
    assert same(again, (aux, last, said))
    (tmp_path / "said.bin").unlink()  # as an earlier version left it
    assert same(opened(tmp_path, teacher).of(SAMPLES), again)


def test_what_the_target_says_is_kept_and_enough_for_a_reduced_vocabulary(teacher, tmp_path):
    """Probabilities from the ids that can be drafted alone are those of the whole softmax."""
    store, ids = opened(tmp_path, teacher), torch.tensor([1, 4, 5, 40])
    _, last, said = store.of(SAMPLES[:1])
    rows = last.flatten(0, 1)
    expected, best = teacher.probabilities(rows, ids)
    kept = Said(*(column.flatten() for column in said))
    found, found_best = teacher.probabilities(rows, ids, kept)
    torch.testing.assert_close(found, expected)
    assert found_best.equal(best)
    says = teacher.says(rows)
    assert says.best.equal(best)
    torch.testing.assert_close(says.normalizer, kept.normalizer)


def test_states_are_kept_of_a_target_in_half_precision(model, tmp_path):
    """They are read as float32, and the target's head takes them."""
    half = Teacher(load_target(copy.deepcopy(model), dtype=torch.bfloat16))
    half.tap(AUX)
    _, last, said = opened(tmp_path, half).of(SAMPLES[:1])
    rows, ids = last.flatten(0, 1), torch.tensor([1, 4, 5, 40])
    expected, best = half.probabilities(rows, None)
    found, _ = half.probabilities(rows, ids, Said(*(column.flatten() for column in said)))
    torch.testing.assert_close(found, expected[:, ids])
    assert said.best.flatten().equal(best)


def test_what_a_killed_process_left_is_cut_off(teacher, tmp_path):
    expected = opened(tmp_path, teacher).of(SAMPLES)
    index, rows = tmp_path / "index.jsonl", tmp_path / "rows.bin"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:-1]) + '{"sam')
    rows.write_bytes(rows.read_bytes() + b"half a row")
    store = opened(tmp_path, teacher)
    assert rows.stat().st_size == sum(map(len, SAMPLES[:2])) * store.row_bytes
    found = store.of(SAMPLES)
    assert same(first_two(found), first_two(expected))
    # the third is computed alone now, and products of one row round otherwise than those of three
    assert same(store.of(SAMPLES[2:]), opened(tmp_path / "alone", teacher).of(SAMPLES[2:]))


def test_other_states_and_a_file_that_ends_early_are_refused(teacher, tmp_path):
    opened(tmp_path, teacher).of(SAMPLES)
    with pytest.raises(InvalidOption, match="another output folder"):
        KeptStates(tmp_path).open(teacher, (1, 2, 3))
    store = opened(tmp_path, teacher)
    (tmp_path / "rows.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="ends before what its index says"):
        store.of(SAMPLES)


def test_the_target_runs_once_a_sequence(model, tmp_path, monkeypatch):
    data = written_by(model, tmp_path / "written.jsonl")
    seen = []
    real = Teacher.states
    monkeypatch.setattr(
        Teacher, "states", lambda self, ids: [seen.append(len(ids)), real(self, ids)][1]
    )
    lengths = {}
    for name, keep in (("fly", False), ("kept", True)):
        seen.clear()
        options = quick_options(steps=16, batch_tokens=256, keep_states=keep)
        train(model, data, tmp_path / name, options=options)
        lengths[name] = sum(seen)
    log = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "training/log.jsonl").open()]
        for name in lengths
    ]
    assert lengths["kept"] < 24 < lengths["fly"]  # several epochs
    torch.testing.assert_close(torch.tensor(log[1]), torch.tensor(log[0]), rtol=1e-2, atol=0)


def test_a_folder_of_saved_states_is_data(model, tmp_path):
    folder = tmp_path / "saved"
    layers = {"aux_layers": AUX, "last_hidden": "post_norm"}
    with compilespec.compile(
        model, "save_hidden_states", output_dir=folder, backend="eager", max_batch_size=2,
        max_seq_len=32, **layers,
    ) as engine:  # fmt: skip
        outputs = engine.generate([[1, 2, 3], [9, 8]], SamplingParams(max_new_tokens=8))
    data = RecordedStates(folder)
    teacher = Teacher(load_target(model))
    teacher.tap((*AUX, FINAL_NORM)[:3])
    data.open(teacher, AUX)
    written = {one.prompt_token_ids[0]: one for one in outputs}
    for sample in data.samples():
        output = written[sample.token_ids[0]]
        whole = (*output.prompt_token_ids, *output.token_ids)
        assert sample.token_ids == whole[: len(sample)]
        assert sample.start == len(output.prompt_token_ids)
        for found, expected in zip(
            data.of([sample])[:2], teacher.states(torch.tensor([sample.token_ids]))[:2], strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidOption, match="the drafter reads"):
        RecordedStates(folder).open(teacher, (1, 2, 3))


def test_states_before_the_norm_are_refused(tmp_path):
    index = {"format": "compilespec hidden states 1", "last_hidden": "pre_norm", "shards": []}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidOption, match="last_hidden='post_norm'"):
        RecordedStates(tmp_path)
