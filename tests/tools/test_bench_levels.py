"""The bench of kernel choices: who is asked, what is compared, and when it fails."""

import os

import pytest
from rich.console import Console

from compilespec.ops import _levels
from tools.bench import levels

TOKENS = {"best": [[1, 2], [3, 4]], "next": [[1, 2], [3, 5]]}


class Worker:
    apart = ""  # whose rows differ in company

    def __init__(self, name, _) -> None:
        self.name, self.number = name, 0

    def ask(self, weights):
        self.number += 1
        speeds = dict.fromkeys(levels.FIGURES, float(self.number))
        return {**speeds, "tokens": TOKENS[self.name], "independent": self.name != self.apart}

    def close(self) -> None: ...


@pytest.mark.parametrize(("apart", "status"), [("", 0), ("next", 1)])
def test_levels_take_turns_and_rows_must_not_differ_in_company(monkeypatch, apart, status):
    written = {}
    monkeypatch.setattr(levels, "Worker", Worker)
    monkeypatch.setattr(Worker, "apart", apart)
    monkeypatch.setattr(levels.report, "write_json", lambda _, content: written.update(content))
    assert levels.main(["--level", "best", "next", "--rounds", "2"]) == status
    rows = written["rows"]
    assert [row["as_the_best_level"] for row in rows] == [2, 1] * len(levels.WEIGHTS)
    assert rows[0]["tokens_per_s"] == dict.fromkeys(levels.FIGURES, 2.5), "the first warms up"
    levels.show(Console(quiet=True), rows)


def test_a_process_is_started_with_its_level_alone(monkeypatch):
    seen = []
    monkeypatch.setenv(_levels.VARIABLE, "before")
    monkeypatch.setattr(
        "multiprocessing.context.SpawnProcess.start",
        lambda _: seen.append(os.environ[_levels.VARIABLE]),
    )
    levels.Worker("avx2", levels.parse([]))
    assert seen == ["avx2"]
    assert os.environ[_levels.VARIABLE] == "before"
