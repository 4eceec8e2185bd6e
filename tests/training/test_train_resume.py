"""A run that was stopped goes on as if it had not been."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, TrainingDiverged
from compilespec.training import state, trainer
from compilespec.training.data import Sample, split_held_out
from compilespec.training.eagle3 import Eagle3Training
from compilespec.training.entry import Listener, train
from compilespec.training.files import alone_in
from compilespec.training.options import TrainOptions
from compilespec.training.schedule import Schedule
from tests.support.training import quick_options, tiny_teacher, write_lines, written_by


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_teacher()


@pytest.fixture(scope="module")
def data(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(model, tmp_path_factory.mktemp("data") / "written.jsonl")


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses do not depend on measuring, which takes an engine."""
    found = trainer.MeasuredAcceptance(overall=1.5, by_domain={}, num_prompts=1, num_steps=1)
    monkeypatch.setattr(trainer, "measure", lambda *args: found)


class StopAfter(Listener):
    """Dies in the middle of a run, as a killed process does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_record(self, record: Any, run: Any) -> None:
        if record.step == self.step:
            raise KeyboardInterrupt


def losses(folder: Path) -> list[float]:
    lines = (folder / "training" / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["losses"] for line in lines]


def test_mixed_precision_learns_nearly_the_same(model, data, tmp_path):
    """Products in bfloat16 change the losses a little, and leave the weights float32."""
    for name in ("exact", "mixed"):
        train(model, data, tmp_path / name, options=quick_options(mixed_precision=name == "mixed"))
    exact, mixed = (torch.tensor(losses(tmp_path / name)) for name in ("exact", "mixed"))
    assert not exact.equal(mixed)
    torch.testing.assert_close(mixed, exact, rtol=0.02, atol=0.0)
    content = torch.load(tmp_path / "mixed" / "training" / "state.pt", weights_only=False)
    assert {one.dtype for one in content["drafter"].values() if one.is_floating_point()} == {
        torch.float32
    }


def test_a_stopped_run_has_the_same_losses(model, data, tmp_path):
    """Stopped between two saved states; the rest goes over the end of an epoch."""
    stop = 4
    options = quick_options(steps=14, batch_tokens=256)
    train(model, data, tmp_path / "whole", options=options)
    with pytest.raises(KeyboardInterrupt):
        train(model, data, tmp_path / "cut", options=options, listener=StopAfter(stop))
    assert len(losses(tmp_path / "cut")) == stop + 1
    with pytest.raises(InvalidOption, match="holds a run already"):
        train(model, data, tmp_path / "cut", options=options)
    train(model, data, tmp_path / "cut", options=options, resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    states = [
        state.load_state(tmp_path / name / "training" / "state.pt") for name in ("whole", "cut")
    ]
    assert states[0]["run"]["place"] == states[1]["run"]["place"]
    assert states[0]["run"]["place"]["epoch"] > 0
    for name, tensor in states[0]["drafter"].items():
        assert tensor.equal(states[1]["drafter"][name])


def test_a_signal_ends_the_run_with_its_state_saved(model, data, tmp_path):
    class Told(Listener):
        def on_record(self, record: Any, run: Any) -> None:
            if record.step == 2:
                signal.raise_signal(signal.SIGTERM)

    options = quick_options(save_every=50)
    result = train(model, data, tmp_path, options=options, listener=Told())
    assert (result.num_steps, result.interrupted) == (3, True)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    again = train(model, data, tmp_path, options=options, resume=True)
    assert (again.num_steps, again.interrupted) == (6, False)


@pytest.mark.parametrize("method", ["eagle3", "mtp_eagle"])
def test_a_run_begins_with_the_weights_of_a_checkpoint(model, data, tmp_path, method):
    """The one step's learning rate is too small to change much of what was stored."""
    first, second = tmp_path / "first", tmp_path / "second"
    train(model, data, first, method=method, options=quick_options(steps=3, depth=1))
    options = quick_options(steps=1, start_from=str(first), learning_rate=1e-12)
    train(model, data, second, method=method, options=options)
    stored = [load_file(folder / "model.safetensors") for folder in (first, second)]
    assert stored[0].keys() == stored[1].keys()
    for name, tensor in stored[0].items():
        torch.testing.assert_close(stored[1][name], tensor, rtol=0, atol=1e-10)
    other = quick_options(steps=1, start_from=str(first), intermediate_size=24)
    with pytest.raises(DraftMismatch, match=r"expected a .* of \[24, .*intermediate_size"):
        train(model, data, tmp_path / "third", method=method, options=other)


def test_data_may_grow_but_not_change(model, data, tmp_path):
    lines = data.read_text().splitlines(keepends=True)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(lines[:18]))
    options = quick_options(steps=8, batch_tokens=96)
    with pytest.raises(KeyboardInterrupt):
        train(model, mine, tmp_path / "run", options=options, listener=StopAfter(1))
    mine.write_text("".join([*lines[3:18], *lines[:3]]))
    with pytest.raises(InvalidOption, match="not that which the run to resume began with"):
        train(model, mine, tmp_path / "run", options=options, resume=True)
    mine.write_text("".join(lines))
    result = train(model, mine, tmp_path / "run", options=options, resume=True)
    assert result.num_steps == 8
    other = quick_options(steps=8, batch_tokens=97)
    with pytest.raises(InvalidOption, match=r"batch_tokens=97.*began with 96"):
        train(model, mine, tmp_path / "run", options=other, resume=True)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_state(
    model, data, tmp_path, monkeypatch
):
    real = trainer.make_lesson
    calls = []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        lesson = real(*args, **kwargs)
        calls.append(1)
        if len(calls) == 4:
            lesson.probs[0, 0, 0] = float("nan")
        return lesson

    monkeypatch.setattr(trainer, "make_lesson", poisoned)
    with pytest.raises(TrainingDiverged, match=r"loss of step 3 is nan.*learning_rate"):
        train(model, data, tmp_path, options=quick_options())
    kept = state.load_state(tmp_path / "training" / "state.pt")
    assert kept["run"]["step"] == 2
    result = train(model, data, tmp_path, options=quick_options(), resume=True)
    assert result.num_steps == 6


def test_a_full_disk_and_a_kill_in_mid_write_keep_the_last_state(
    model, data, tmp_path, monkeypatch
):
    real = state.torch.save
    calls = []

    def full(content: Any, path: Path) -> None:
        calls.append(1)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(content, path)

    monkeypatch.setattr(state.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"state.pt cannot be written.*No space left"):
        train(model, data, tmp_path, options=quick_options())
    folder = tmp_path / "training"
    assert state.load_state(folder / "state.pt")["run"]["step"] == 2
    assert not list(folder.glob("*.part"))
    (folder / "state.pt.part").write_bytes(b"half")  # what a killed process leaves
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "lo')
    result = train(model, data, tmp_path, options=quick_options(), resume=True)
    assert result.num_steps == 6
    assert len(losses(tmp_path)) == 6
    (folder / "state.pt").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"state.pt cannot be read"):
        train(model, data, tmp_path, options=quick_options(), resume=True)


def test_a_worse_head_does_not_replace_a_better_one(model, data, tmp_path, monkeypatch):
    """And without a better one the run ends early, after a fall of the learning rate."""
    found = iter([2.0, *[1.5] * 50])

    def measured(*args: Any) -> Any:
        return trainer.MeasuredAcceptance(
            overall=next(found), by_domain={}, num_prompts=1, num_steps=1
        )

    monkeypatch.setattr(trainer, "measure", measured)
    heads = []

    class Keep(Listener):
        def on_record(self, record: Any, run: Any) -> None:
            heads.append((tmp_path / "model.safetensors").read_bytes())

    options = quick_options(steps=200, eval_every=1, patience=3)
    result = train(model, data, tmp_path, options=options, listener=Keep())
    assert result.num_steps == 5  # one good, three worse, a fall of a quarter of four
    assert result.acceptance == 2.0
    assert len(set(heads)) == 1
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".parts")]


def test_two_runs_do_not_write_one_folder(model, data, tmp_path):
    with (
        alone_in(tmp_path / "run" / "training"),
        pytest.raises(InvalidOption, match="written by another process"),
    ):
        train(model, data, tmp_path / "run", options=TrainOptions(steps=1))


def test_a_schedule_follows_steps_minutes_or_a_wish():
    options = quick_options(steps=40, warmup_steps=4, decay_share=0.25)
    by_steps = Schedule()
    by_steps.update(0, 0.0, options, finish=False)
    rates = [by_steps.factor(step, 4) for step in (0, 3, 20, 30, 35, 39)]
    assert rates == [0.25, 1.0, 1.0, 1.0, 0.5, 0.1]
    timed = quick_options(steps=None, max_minutes=10.0, decay_share=0.25)
    by_minutes = Schedule()
    by_minutes.update(100, 440.0, timed, finish=False)
    assert by_minutes.end is None
    by_minutes.update(100, 450.0, timed, finish=False)
    assert (by_minutes.end, by_minutes.num_decay) == (133, 33)
    by_minutes.update(120, 590.0, timed, finish=False)
    assert by_minutes.end == 133
    wished = Schedule()
    wished.update(80, 1.0, quick_options(steps=None), finish=True)
    assert (wished.end, wished.num_decay) == (100, 20)


def test_one_sequence_that_is_held_out_leaves_nothing(model, tmp_path):
    """Which one that is, its hash says."""
    samples = [Sample(token_ids=(one, 5, 6, 7), start=1) for one in range(60)]
    (held_out, *_) = split_held_out(samples, 2)[1]
    data = write_lines(tmp_path / "one.jsonl", [{"token_ids": held_out.token_ids}])
    with pytest.raises(InvalidOption, match="all are held out"):
        train(model, data, tmp_path / "out", options=quick_options(held_out_one_in=2, steps=1))


class Few:
    """A user's loader."""

    def samples(self) -> list[Sample]:
        return [Sample(token_ids=(one, *range(3, 9)), start=2) for one in range(12)]


class Narrow(Eagle3Training):
    """A user's method."""

    def create(self, info: Any, counts: Any, options: Any) -> Any:
        return super().create(info, counts, dataclasses.replace(options, intermediate_size=5))


def test_a_loader_and_a_method_of_ones_own(model, tmp_path):
    options = quick_options(steps=2, layout="speculators")
    result = train(model, Few(), tmp_path, method=Narrow(), options=options)
    assert result.num_steps == 2
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["transformer_layer_config"]["intermediate_size"] == 5
    with pytest.raises(InvalidOption, match=r"method.*eagle3"):
        train(model, Few(), tmp_path / "other", method="eagle4", options=options)
