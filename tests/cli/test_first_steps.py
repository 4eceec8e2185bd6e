"""What a newcomer meets first: the first words, `doctor`, `demo` and the shell's completion."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from compilespec import _torch_compat
from compilespec.cli import COMMANDS, DEMO, FIRST_WORDS, build_parser, generate, main


def test_without_arguments_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.strip() == FIRST_WORDS
    for words in ("doctor", "demo", "chat MODEL", "serve MODEL", "--help"):
        assert f"compilespec {words}" in said


def test_demo_is_a_comparison_on_the_demo_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(generate, "run", lambda args: seen.append(args) or 0)
    assert main(["demo", "--max-new-tokens", "3"]) == 0
    assert (seen[0].model, seen[0].spec, seen[0].compare) == ("demo", "eagle3", True)
    assert seen[0].max_new_tokens == 3
    build_parser().parse_args(DEMO)


def test_doctor_finds_what_the_tests_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "cpu", "compiler", "cache", "memory", "gpu"} <= set(found)
    assert all(one["state"] in ("ok", "note") for one in found.values())
    assert main(["doctor"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24  # a screen


def test_doctor_names_a_missing_compiler_and_its_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("MISSING compiler"))
    assert "CXX=no-such-compiler is no program in PATH" in lines[place]
    assert "set CXX" in lines[place + 1]


def test_doctor_names_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["doctor"]) == 1
    assert "set COMPILESPEC_CACHE_DIR to one that can" in capsys.readouterr().out


def test_doctor_says_that_torch_is_newer_than_any_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_torch_compat, "VERSION", (2, 99))
    assert main(["doctor"]) == 0
    assert "the newest tested" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words: str) -> set[str]:
        call = "_compilespec; printf '%s\\n' \"${COMPREPLY[@]}\""
        given = f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}\n"
        command = ["bash", "-c", f"{script}\n{given}{call}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    names = {one.__name__.rpartition(".")[2] for one in COMMANDS}
    assert complete("compilespec", '""') >= {"demo", *names}
    assert complete("compilespec", "se") == {"serve"}
    assert complete("compilespec", "serve", "--max-wai") == {"--max-waiting"}


def test_zsh_gets_the_same_through_its_own_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# eval")
    assert "bashcompinit" in said
    assert "complete -F _compilespec compilespec" in said
