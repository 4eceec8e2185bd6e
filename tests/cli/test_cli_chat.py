"""`compilespec chat` over the toy program: history, commands, interrupts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compilespec.cli import chat, main
from compilespec.runtime.engine import Engine
from tests.support.live_server import toy_engine

Talk = Callable[..., tuple[str, str]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Gives what stdout and stderr get for lines of input."""

    def hold(engine: Engine, *lines: str, flags: tuple[str, ...] = ()) -> tuple[str, str]:
        monkeypatch.setattr(chat, "compile_engine", lambda args, spec, **changes: engine)
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        assert main(["chat", "--model", "toy", *flags]) == 0
        told = capsys.readouterr()
        return told.out, told.err

    return hold


def test_answers_status_and_history(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    out, err = talk(
        toy_engine("One two."), "hi", "", "/system Be brief", "again?", "/save " + str(saved)
    )
    assert out == "One two.\nOne two.\n"
    assert "9 tokens; " in err
    assert "tokens a verify step; " in err
    assert "of 256" in err
    assert json.loads(saved.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "One two."},
        {"role": "user", "content": "again?"}, {"role": "assistant", "content": "One two."},
    ]  # fmt: skip


def test_commands(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    out, err = talk(
        toy_engine("One."), "/again", "a", "b", "/undo", "/set max_new_tokens 2", "/again",
        "/settings", "/set max_new_tokens", "/set seed x", "/set n 2", "/set temperature -1",
        "/nope", "/help", f"/save {saved}", "/save /", "/reset", "c", "/exit", "never read",
    )  # fmt: skip
    assert out == "One.\nOne.\nOn\nOne.\n"
    for message in (
        "there is no question yet", "cut at the limit", '"max_new_tokens": 2', "expected a number",
        "got 'n'", "temperature: expected", "no command /nope", "/undo", "/save: ",
    ):  # fmt: skip
        assert message in err, message
    assert [one["content"] for one in json.loads(saved.read_text())] == ["a", "On"]


def test_an_interrupt_stops_the_answer_alone(talk: Talk) -> None:
    calls = iter([False] * 8 + [True] + [False] * 1000)

    def fail(phase: str) -> None:
        if next(calls):
            raise KeyboardInterrupt

    engine = toy_engine("a long answer that goes on and on", hit_rate=0.0, fail=fail)
    out, err = talk(engine, "hi", "hi")
    first, second = out.splitlines()
    assert second == "a long answer that goes on and on"
    assert second.startswith(first)
    assert len(first) < len(second)
    assert "stopped; " in err


def test_a_conversation_that_grows_too_long_says_so_and_goes_on(talk: Talk) -> None:
    out, err = talk(toy_engine("One."), "x" * 300, "hi")
    assert out == "One.\n"
    assert "error: the prompt has" in err


def test_what_cannot_be_is_said_at_once(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    engine = toy_engine("x")
    engine.tokenizer.chat_template = None  # type: ignore[union-attr]
    monkeypatch.setattr(chat, "compile_engine", lambda args, spec, **changes: engine)
    for flags, message in (
        ([], "no chat template: expected a chat model"),
        (["--n", "2"], "one answer"),
        (["--temperature", "-1"], "--temperature: expected"),
    ):
        assert main(["chat", "--model", "toy", *flags]) == 2
        assert message in capsys.readouterr().err
