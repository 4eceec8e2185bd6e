"""spec="save_hidden_states": plain tokens, and on disk what forward hooks see."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, DraftMismatch, EngineClosed, InvalidOption
from compilespec.methods.registry import get_method
from compilespec.methods.save_hidden_states import Layout, Recorder, SavedStates, prompt_digest
from tests.support.hooks import seen_by_hooks
from tests.support.models import ask_all, assert_nothing_held, run_traffic, target_info, tiny_target

OPTIONS = {
    "spec": "save_hidden_states", "backend": "eager", "max_batch_size": 4, "max_seq_len": 75,
    "max_prefill_tokens": 16, "buckets": [1, 2, 4],
}  # fmt: skip
SIZES = ((1, 12), (40, 9), (16, 17), (64, 11), (70, 5), (74, 1), (2, 3))


@functools.cache
def asked(family):
    model = tiny_target(family)
    return model, tuple(ask_all(model, SIZES))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma3", {"aux_layers": (0, 6, 1), "last_hidden": "post_norm"}),
        pytest.param("qwen3_moe", {"aux_layers": (5,)}, marks=pytest.mark.slow),
    ],
)
def test_records_are_what_forward_hooks_see(tmp_path, family, options):
    """Prompts cut into chunks, requests that join and leave; rows in the order they end."""
    model, asks = asked(family)
    directory = tmp_path / "states"
    with compilespec.compile(
        model, output_dir=directory, shard_tokens=60, **options, **OPTIONS
    ) as engine:
        requests = run_traffic(engine, asks, (1, 2, 4))
        for request, ask in zip(requests, asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0
        assert any(str(directory) in why for why in engine.plan()["why"])
        pending = engine.executor.lowered.program.drafter.recorder._num_pending
        assert pending < 60
    saved = SavedStates(directory)
    assert len(saved) == len(asks)
    assert len(saved.listing["shards"]) >= 3
    assert saved.listing["num_tokens"] == sum(len(a.prompt) + len(a.tokens) - 1 for a in asks)
    assert saved.prompt_digests() == {prompt_digest(ask.prompt) for ask in asks}

    by_tokens = {(*ask.prompt, *ask.tokens)[:-1]: ask for ask in asks}
    close = {"atol": 1e-9, "rtol": 1e-9}
    for record in saved:
        tokens = record["input_ids"].tolist()
        ask = by_tokens.pop(tuple(tokens))
        wanted = seen_by_hooks(model, tokens, options.get("aux_layers", (2, 3, 4)))
        torch.testing.assert_close(record["hidden_states"], wanted, **close)
        last = seen_by_hooks(model, tokens, (7,))
        if "last_hidden" in options:
            assert "verifier_last_hidden_states" not in record
            with torch.no_grad():
                last = model.model.norm(last)
            torch.testing.assert_close(record["normed_last_hidden_states"], last, **close)
        else:
            torch.testing.assert_close(record["verifier_last_hidden_states"], last, **close)
        mask = [int(place >= len(ask.prompt)) for place in range(len(tokens))]
        assert record["loss_mask"].tolist() == mask
        assert record["loss_mask"].dtype == record["input_ids"].dtype == torch.int64
    assert not by_tokens


def test_what_was_aborted_is_not_saved_and_a_directory_is_continued(tmp_path):
    model, asks = asked("llama")
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    options = {**OPTIONS, "output_dir": tmp_path, "aux_layers": (1,)}
    with compilespec.compile(model, shard_tokens=10**6, **options) as engine:
        gone, kept = engine.submit(list(asks[1].prompt), params), engine.submit([5, 6], params)
        for _ in range(4):
            engine.step()
        engine.abort(gone)
        assert kept.row >= 0
        engine.generate([[7, 8, 9]], params)  # its row is the aborted one's
        assert not list(tmp_path.iterdir())  # nothing is full yet
    first = SavedStates(tmp_path)
    assert {len(record["input_ids"]) for record in first} == {7, 8}
    assert first.prompt_digests() == {prompt_digest([5, 6]), prompt_digest([7, 8, 9])}

    with compilespec.compile(model, shard_tokens=1, **options) as engine:
        engine.generate([[7, 8], [9]], params)
        second = SavedStates(tmp_path)  # readable while the engine runs
        assert len(second) == 4
    assert [shard["num_records"] for shard in second.listing["shards"]] == [2, 1, 1]
    tokens = second[3]["input_ids"].tolist()
    torch.testing.assert_close(
        second[-1]["hidden_states"], seen_by_hooks(model, tokens, (1,)), atol=1e-9, rtol=1e-9
    )
    with pytest.raises(IndexError):
        second[4]


def test_records_that_cannot_be_written_wait_for_another_close(tmp_path):
    """The directory's name is taken by a file: a disk that is full, or gone."""
    model, _ = asked("llama")
    params, directory = SamplingParams(max_new_tokens=3, ignore_eos=True), tmp_path / "states"
    engine = compilespec.compile(model, output_dir=directory, aux_layers=(1,), **OPTIONS)
    server = engine.serve()
    server.submit([5, 6], params).result(60)
    directory.touch()
    with pytest.raises(EngineClosed, match=r"CheckpointError.*1 records cannot be written"):
        server.close()
    with pytest.raises(CheckpointError, match="they are kept"):
        engine.close()
    assert not engine._executor.buffers
    directory.unlink()
    engine.close()
    engine.close()
    assert SavedStates(directory).prompt_digests() == {prompt_digest([5, 6])}


# --- the recorder by itself ---

LAYOUT = Layout(aux_layers=(2, 4), last_hidden="pre_norm", hidden_size=3, dtype=torch.float32)


def record(recorder: Recorder, row: int, prompt: list[int], output: list[int]) -> torch.Tensor:
    """One request of random states, given in pieces."""
    states = torch.randn(len(prompt) + len(output) - 1, 9)
    for piece in states.split(2):
        recorder.add(row, piece)
    request = SimpleNamespace(
        row=row, prompt_token_ids=tuple(prompt), output_token_ids=output,
        num_tokens=len(prompt) + len(output),
    )  # fmt: skip
    recorder.finish(request, "length")
    return states


def test_a_run_killed_between_its_files_is_continued(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, LAYOUT, shard_tokens=4)
    first = record(recorder, 0, [1, 2, 3], [4, 5])
    real = os.replace

    def killed(source, target):
        if Path(target).name == "index.json":
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record(recorder, 0, [9], [8, 7, 6, 5])
    monkeypatch.setattr(os, "replace", real)
    assert (tmp_path / "states-00001.safetensors").exists()  # which no index lists
    assert len(SavedStates(tmp_path)) == 1

    recorder = Recorder(tmp_path, LAYOUT, shard_tokens=4)
    second = record(recorder, 2, [4, 4, 4], [4, 4])
    third = record(recorder, 2, [3], [3])  # waits for the end
    assert len(SavedStates(tmp_path)) == 2
    recorder.close()
    saved = SavedStates(tmp_path)
    assert [one["input_ids"].tolist() for one in saved] == [[1, 2, 3, 4], [4, 4, 4, 4], [3]]
    for one, states in zip(saved[:], (first, second, third), strict=True):
        assert torch.equal(one["hidden_states"], states[:, :6])
        assert torch.equal(one["verifier_last_hidden_states"], states[:, 6:])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="must be a directory that can be read"):
        Recorder(tmp_path / "notes.txt", LAYOUT, shard_tokens=4)
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        Recorder(tmp_path, LAYOUT, shard_tokens=4)
    (tmp_path / "index.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(CheckpointError, match="expected format"):
        Recorder(tmp_path, LAYOUT, shard_tokens=4)
    other = tmp_path / "states"
    record(Recorder(other, LAYOUT, shard_tokens=1), 0, [1], [2])
    changed = Layout(aux_layers=(2, 5), last_hidden="pre_norm", hidden_size=3, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"aux_layers \[2, 4\], got \[2, 5\]"):
        Recorder(other, changed, shard_tokens=4)
    with pytest.raises(CheckpointError, match="not an index"):
        SavedStates(tmp_path / "nothing")


def test_options_are_checked(tmp_path):
    model = tiny_target("llama", num_layers=3)
    info = target_info(model, 75)

    def refused(words, error=InvalidOption, **options):
        with pytest.raises(error, match=words) as caught:
            get_method("save_hidden_states").load(None, info, options)
        assert "\n" not in str(caught.value)

    refused("needs output_dir")
    refused("need 7 target layers", DraftMismatch, output_dir=tmp_path)
    refused("shard_tokens", output_dir=tmp_path, shard_tokens=0)
    refused("last_hidden must be", output_dir=tmp_path, last_hidden="normed")
    refused("distinct hs indices from 0 to 3", output_dir=tmp_path, aux_layers=(1, 3))
    refused("must be hs indices", output_dir=tmp_path, aux_layers=())
    with pytest.raises(InvalidOption, match="needs a drafting method"):
        compilespec.compile(
            model, output_dir=tmp_path, aux_layers=(1,), num_draft_tokens=2, **OPTIONS
        )
    assert not list(tmp_path.iterdir())


def test_every_pass_is_what_its_reference_says(tmp_path):
    program = compilespec.trace(
        tiny_target("llama", num_layers=2), "save_hidden_states", output_dir=tmp_path,
        aux_layers=(0, 1), max_batch_size=3, max_seq_len=48, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program)
    assert report.ok, str(report)
    assert "output_hidden_states" in str(report)
