"""The progress of a training run: a live line on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from compilespec.training.entry import Listener
from compilespec.training.generation import Generated
from compilespec.training.options import TrainOptions
from compilespec.training.report import Record
from compilespec.training.state import RunState

LINE_SECONDS = 20.0  # seconds between lines without a terminal


class Shown(Listener):
    """Steps, loss, tokens a second, acceptance and the time that is left, on stderr."""

    def __init__(self, options: TrainOptions) -> None:
        self._options, self._console = options, Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._bar = self._progress.add_task("", total=None, state="")
        self._started = time.monotonic()
        self._said_at = 0.0
        self._first: Record | None = None
        self._acceptance = ""

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def on_plan(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print(line, highlight=False, soft_wrap=True)

    def on_generated(self, state: Generated) -> None:
        rate = state.num_tokens / max(time.monotonic() - self._started, 1e-9)
        failed = f", {state.num_failed} failed" if state.num_failed else ""
        self._show(
            "answers",
            f"{state.num_done} of {state.num_prompts}{failed}, {rate:.0f} tokens/s",
            state.num_done / state.num_prompts,
        )

    def on_record(self, record: Record, run: RunState) -> None:
        first = self._first = self._first or record
        seconds = record.seconds - first.seconds
        rate = (record.num_tokens - first.num_tokens) / seconds if seconds > 0 else 0.0
        if record.acceptance is not None:
            self._acceptance = f", acceptance {record.acceptance.overall:.2f}"
        part = self._part(record, run)
        left = record.seconds * (1 - part) / part if part else None
        state = (
            f"step {record.step + 1}, loss {record.loss:.3f}, {rate:.0f} tokens/s"
            f"{self._acceptance}{'' if left is None else f', {_duration(left)} left'}"
        )
        self._show("training", state, part, now=record.acceptance is not None)

    def _part(self, record: Record, run: RunState) -> float:
        """The part of the run that is done; 0 where its end is not known."""
        if run.schedule.end is not None:
            return (record.step + 1) / run.schedule.end
        if self._options.max_minutes is not None:
            return min(1.0, record.seconds / (60 * self._options.max_minutes))
        return 0.0

    def _show(self, what: str, state: str, part: float, *, now: bool = False) -> None:
        self._progress.update(
            self._bar, description=what, state=state, completed=part, total=1 if part else None
        )
        due = time.monotonic() - self._said_at > LINE_SECONDS
        if not self._console.is_terminal and (now or due):
            self._said_at = time.monotonic()
            print(f"{what}: {state}", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
