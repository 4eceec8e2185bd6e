"""A job that cannot go on: every rank that is left says why in one line, soon, and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.rank_commands import (
    Command,
    copy_package,
    end_all,
    rank_of,
    save_toy,
    start_as_torchrun,
    start_command,
    wait_for_end,
    wait_for_text,
)

SOON_S = 20.0  # after a rank is gone; most of it is for a busy machine
START_S = 400.0
ENDED = 2  # the exit code of a command that says what is wrong


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("models") / "model", max_positions=8192)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    return tmp_path


@pytest.fixture
def running() -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    end_all(commands)


def generate(size: int, count: int = 8000) -> list[str]:
    return [
        "generate", "--model", "model", "--spec", "ngram", "--backend", "eager", "--dtype",
        "float64", "--max-new-tokens", str(count), "--ignore-eos", "--prompt", "ab ab ab",
        "--tensor-parallel-size", str(size),
    ]  # fmt: skip


def other_rank(folder: Path, fault: str) -> str:
    """Let rank 1 have other weights, or another version; what is said then."""
    own = folder / "rank1"
    own.mkdir()
    if fault == "weights":
        save_toy(own / "model", seed=1, max_positions=8192)
        return "rank 1 has other weights than rank 0"
    (own / "model").symlink_to((folder / "model").resolve())
    copy_package(own)
    return "rank 1 has other version of compilespec than rank 0"


def check_one_line(lines: Sequence[str], says: str) -> None:
    assert len(lines) == 1, lines
    assert lines[0].startswith("compilespec: error: "), lines
    assert says in lines[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_generating_ends_the_others(
    folder: Path, running: list[Command], victim: int
) -> None:
    running += start_as_torchrun(generate(3), folder, 3)
    wait_for_text(running[0])
    running[victim].process.send_signal(signal.SIGKILL)
    left = [one for rank, one in enumerate(running) if rank != victim]
    assert wait_for_end(left, SOON_S) == [ENDED, ENDED]
    for one in left:
        check_one_line(one.errors, "lost another rank of the job")


@pytest.mark.parametrize("fault", ["weights", "version"])
def test_every_rank_says_how_one_differs(folder: Path, running: list[Command], fault: str) -> None:
    says = other_rank(folder, fault)
    running += start_as_torchrun(generate(3), folder, 3)
    assert wait_for_end(running, START_S) == [ENDED] * 3
    for one in running:
        check_one_line(one.errors, says)


def test_the_command_shows_what_its_ranks_say_when_one_is_killed(
    folder: Path, running: list[Command]
) -> None:
    command = start_command(generate(3), folder)
    running.append(command)
    wait_for_text(command)
    os.kill(rank_of(command.process.pid, 1), signal.SIGKILL)
    assert wait_for_end([command], SOON_S) == [128 + signal.SIGKILL]
    first, why, third = sorted(command.errors)
    check_one_line([first], "rank 0 lost another rank of the job")
    assert third.startswith("rank 2: compilespec: error: rank 2 lost another rank of the job")
    assert why == "rank 1 was ended by signal 9, and the job with it"


@pytest.mark.parametrize("fault", ["weights", "version"])
def test_the_command_shows_how_a_rank_differs(
    folder: Path, running: list[Command], fault: str
) -> None:
    says = other_rank(folder, fault)
    command = start_command(generate(2), folder)
    running.append(command)
    assert wait_for_end([command], START_S) == [ENDED]
    assert sorted(line.partition("compilespec: error: ")[0] for line in command.errors) == [
        "", "rank 1: ",
    ]  # fmt: skip
    assert all(says in line for line in command.errors)
