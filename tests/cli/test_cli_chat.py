"""`compilespec chat` over the toy program: history, commands, interrupts."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compilespec.cli import chat, main
from compilespec.runtime.engine import Engine
from tests.support.live_server import toy_engine
from tests.support.toy_tokenizer import byte_level_tokenizer

Talk = Callable[..., tuple[str, str]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Gives what stdout and stderr get for lines of input."""

    def hold(engine: Engine, *lines: str, flags: tuple[str, ...] = ()) -> tuple[str, str]:
        monkeypatch.setattr(chat, "compile_engine", lambda args, spec, **changes: engine)
        monkeypatch.setattr(chat, "chat_tokenizer", lambda model: engine.tokenizer)
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        assert main(["chat", "toy", *flags]) == 0
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


def test_a_question_that_is_too_long_says_so_and_goes_on(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    out, err = talk(toy_engine("One."), "hi", "x" * 300, "ho", f"/save {saved}")
    assert out == "One.\nOne.\n"
    assert "error: the prompt has" in err
    assert "compile with a higher --max-seq-len" in err
    assert "left out" not in err, "for a question that is not kept"
    assert len(json.loads(saved.read_text())) == 4


def test_the_oldest_turns_make_room_for_new_ones(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    questions = [f"question {number} {'x' * 50}" for number in range(6)]
    out, err = talk(toy_engine("One."), "/system Be brief", *questions, f"/save {saved}")
    assert out == "One.\n" * 6
    assert "error" not in err
    assert "the context is full: 1 of 2 questions, the oldest, are left out" in err
    kept = json.loads(saved.read_text())
    assert [one["content"] for one in kept if one["role"] == "user"] == questions, "nothing is lost"


def test_messages_are_loaded_again(talk: Talk, tmp_path: Path) -> None:
    first, second, bad = (tmp_path / f"{name}.json" for name in ("first", "second", "bad"))
    talk(toy_engine("One."), "/system Be brief", "hi", f"/save {first}")
    bad.write_text('[{"role": "assistant", "content": "x"}]')
    _, err = talk(
        toy_engine("Two."), "lost", f"/load {first}", f"/load {bad}", "/load nowhere", "ho",
        f"/save {second}",
    )  # fmt: skip
    assert "1 questions and answers loaded" in err
    assert err.count("give a file that /save wrote") == 2
    contents = [one["content"] for one in json.loads(second.read_text())]
    assert contents == ["Be brief", "hi", "One.", "ho", "Two."]


def test_a_block_between_fences_is_one_question(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    out, _ = talk(
        toy_engine("One."), '"""def f():', "", "    pass", '"""', '"""one line"""',
        '"""', "/tmp is", 'a path"""', f"/save {saved}", '"""to the end',
    )  # fmt: skip
    asked = [one["content"] for one in json.loads(saved.read_text()) if one["role"] == "user"]
    assert asked == ["def f():\n\n    pass", "one line", "/tmp is\na path"]
    assert out == "One.\n" * 4


def test_flags_that_end_an_answer(talk: Talk) -> None:
    out, _ = talk(toy_engine("One two."), "hi", flags=("--stop", " two"))
    assert out == "One\n"


PASTER = """
import sys
from compilespec.cli import chat
from tests.support.live_server import toy_engine
print("ready", flush=True)
chat.Conversation.ask = lambda self, question: print(repr(question), flush=True)
chat.Conversation(toy_engine("One."), {}).hold()
"""


def test_a_pasted_block_is_one_question() -> None:
    """On a terminal, which brackets what is pasted."""
    pid, terminal = pty.fork()
    if not pid:  # the child
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", PASTER])
    shown = b""
    try:
        until = time.monotonic() + 60
        sent = False
        while b"'def f():" not in shown and time.monotonic() < until:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 4096)
            if not sent and b">>> " in shown:
                sent = True
                os.write(terminal, b"\x1b[200~def f():\r    pass\r\x1b[201~\r")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert rb"'def f():\n    pass'" in shown, shown


def test_what_cannot_be_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tiny = tmp_path / "tiny"
    byte_level_tokenizer([b"a", "<end>"], eos="<end>").save_pretrained(tiny)
    (tiny / "config.json").write_text("{}")
    monkeypatch.setattr(chat, "compile_engine", lambda *args, **changes: pytest.fail("compiled"))
    for flags, message in (
        ([], "no chat template: expected a chat model"),
        (["--n", "2"], "one answer"),
        (["--temperature", "-1"], "--temperature: expected"),
    ):
        assert main(["chat", *flags, str(tiny)]) == 2
        assert message in capsys.readouterr().err
