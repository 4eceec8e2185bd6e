"""The bench of growing contexts and batches: what it measures, by turns, and when it fails."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from tools.bench import growth


class Fake:
    """A step takes a millisecond a row; its rows begin with the length of their prompt."""

    def __init__(self, name: str, calls: list[str], wrong: int = 0) -> None:
        self.name, self.calls, self.wrong = name, calls, wrong

    def read(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def decode(self, num_steps: int) -> tuple[float, list[list[int]]]:
        self.calls.append(self.name)
        rows = [[len(prompt)] * (num_steps + 1) for prompt in self.prompts]
        for row in rows[: self.wrong]:
            row[0] = -1
        return float(len(rows)), rows

    def close(self) -> None: ...


def test_a_point_is_measured_by_turns() -> None:
    calls: list[str] = []
    ways = [Fake("a", calls), Fake("b", calls, wrong=1)]
    row = growth.measure_point(ways, 3, 5, [1, 2], SimpleNamespace(rounds=3, steps=4))
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert [len(prompt) for prompt in ways[0].prompts] == [5, 5, 5]
    assert row["step_ms"] == row["fastest_ms"] == {"a": 3.0, "b": 3.0}
    assert row["num_equal"] == 2


@pytest.mark.parametrize(("wrong", "status"), [(0, 0), (1, 0), (2, 1)])
def test_other_tokens_fail_the_run(monkeypatch, tmp_path, wrong: int, status: int) -> None:
    monkeypatch.setattr(growth, "read_prompts", lambda *_: {"text": [1, 2, 3]})
    monkeypatch.setattr(growth.report, "RESULTS_DIR", tmp_path)
    written = {}
    monkeypatch.setattr(growth.report, "write_json", lambda name, content: written.update(content))
    monkeypatch.setattr(growth.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(
        growth, "build",
        lambda _, batch, length, console: [Fake("a", []), Fake("b", [], wrong=wrong)],
    )  # fmt: skip
    assert growth.main(["--context", "4", "--batch", "8"]) == status
    assert [(row["batch"], row["context"]) for row in written["rows"]] == [(1, 4), (8, 256)]
    console = Console(width=100, record=True, quiet=True)
    growth.show(console, written["rows"])
