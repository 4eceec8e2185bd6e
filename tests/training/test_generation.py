"""Prompts are answered by the target, each once, for any stop of the run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import compilespec
from compilespec.cli import main
from compilespec.errors import InvalidOption
from compilespec.tracing.load import load_target
from compilespec.training import entry
from compilespec.training.data import FileData, Prompt
from compilespec.training.generation import Generated, generate_answers, temperature_of
from tests.support.toy_tokenizer import byte_level_tokenizer
from tests.support.training import tiny_teacher, write_lines

PROMPTS = [Prompt(prompt=[n, n + 1, 3], domain=("a", "b")[n % 2]) for n in range(9)]


@pytest.fixture(scope="module")
def engine() -> Any:
    with compilespec.compile(
        tiny_teacher(), "none", backend="eager", max_batch_size=4, max_seq_len=64
    ) as made:
        yield made


def records(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["key"] for one in found}) == len(found)
    return {one["key"]: one for one in found}


def test_answers_are_the_targets_own_and_a_stopped_run_goes_on(engine, tmp_path):
    options = {"max_new_tokens": 6, "temperatures": (0.0, 0.8)}
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    state = generate_answers(engine, PROMPTS, whole, **options)
    assert (state.num_done, state.num_tokens, state.num_failed) == (9, 54, 0)

    def stop(state: Any) -> None:
        if state.num_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_answers(engine, PROMPTS, cut, on_record=stop, **options)
    assert not engine.has_work
    with cut.open("a") as file:
        file.write('{"key": "half')
    state = generate_answers(engine, PROMPTS, cut, **options)
    assert state.num_done == 9
    assert records(cut) == records(whole)
    heats = {one.key: temperature_of(one, (0.0, 0.8)) for one in PROMPTS}
    assert set(heats.values()) == {0.0, 0.8}
    for one in PROMPTS:
        record = records(whole)[one.key]
        assert record["temperature"] == heats[one.key]
        params = compilespec.SamplingParams(
            max_new_tokens=6, temperature=heats[one.key], seed=int(one.key[8:15], 16)
        )
        (plain,) = engine.generate([one.prompt], params)
        assert record["token_ids"] == plain.token_ids
    samples = FileData(
        whole, None, vocab_size=engine.geometry.config.vocab_size, max_length=40
    ).samples()
    assert {(len(one), one.start) for one in samples} == {(9, 3)}


def test_prompts_that_cannot_be_served_are_counted(engine, tmp_path):
    bad = Prompt(prompt=[100_000])
    state = generate_answers(engine, [bad, PROMPTS[0]], tmp_path / "a.jsonl", max_new_tokens=2)
    assert (state.num_done, state.num_failed) == (1, 1)
    with pytest.raises(InvalidOption, match="none of the 1 prompts could be answered"):
        generate_answers(engine, [bad], tmp_path / "b.jsonl")


def test_the_command_answers_trains_and_goes_on(tmp_path, capsys):
    """From prompts to a head that `compile` loads; a second call has nothing to do."""
    model = tiny_teacher()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    size = model.config.vocab_size
    tokens = [bytes([i]) for i in range(32, 32 + size - 1)]
    byte_level_tokenizer([*tokens, "<end>"], eos="<end>").save_pretrained(folder)
    prompts = write_lines(
        tmp_path / "prompts.jsonl", [{"prompt": f"{chr(65 + n)}!$"} for n in range(12)]
    )
    command = [
        "train", "--model", str(folder), "--data", str(prompts), "--output", str(tmp_path / "out"),
        "--generate", "--max-new-tokens", "8", "--backend", "eager", "--steps", "3",
        "--eval-every", "50", "--eval-prompts", "2", "--eval-new-tokens", "4",
        "--held-out-one-in", "3", "--json", "--resume",
    ]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["num_steps"] == 3
    assert result["acceptance"] >= 1.0
    assert "prompts: 12\n" in shown.err
    assert "answers: 12 of 12\n" in shown.err
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["last"] is None
    assert main([*command[:-1]]) == 2
    assert "holds a run already: go on with it by --resume" in capsys.readouterr().err
    assert main([*command, "--learning-rate", "7"]) == 2
    assert "--learning-rate must be above 0" in capsys.readouterr().err


def test_a_chat_model_answers_through_its_template(tmp_path, monkeypatch):
    """Bare texts on a chat model often end at once, and nothing is learned from that."""
    tokenizer = byte_level_tokenizer([bytes([i]) for i in range(32, 127)], eos="<end>")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    target = load_target(tiny_teacher(), tokenizer=tokenizer)
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "ab"}])
    asked: list[Any] = []
    monkeypatch.setattr(entry, "compile_engine", lambda *_, **__: contextlib.nullcontext())

    def generate(engine: Any, prompts: Any, path: Any, **_: Any) -> Generated:
        asked.extend(one.prompt for one in prompts)
        return Generated(num_done=0, num_prompts=1, num_tokens=0, num_failed=1, why="too long")

    monkeypatch.setattr(entry, "generate_answers", generate)
    told: list[str] = []
    listener = entry.Listener()
    listener.on_plan = told.extend  # type: ignore[method-assign]
    for chat_template in (True, False):
        entry.answer(target, path, tmp_path, 8, (0.0,), listener, chat_template=chat_template)
    assert asked == [{"messages": [{"role": "user", "content": "ab"}]}, "ab"]
    assert told == [
        "prompts: 1, 1 bare texts asked through the model's chat template",
        "answers: 0 of 1; 1 failed, the first: too long",
        "prompts: 1",
        "answers: 0 of 1; 1 failed, the first: too long",
    ]


def test_a_run_without_a_measurement_says_so(tmp_path, monkeypatch, capsys):
    result = entry.TrainResult(
        output=tmp_path, num_steps=7, acceptance=0.0, last=None, interrupted=False
    )
    monkeypatch.setattr(entry, "train", lambda *_, **__: result)
    command = ["train", "--model", "m", "--data", "d", "--output", str(tmp_path)]
    assert main(command) == 0
    said = "7 steps, acceptance not measured yet (every 200 steps, and at the end)"
    assert said in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["acceptance"] is None
