"""Parts of a long check, each in a separate process: its output is kept however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RAN_TOO_LONG = 124
_KEPT_LINES = 200  # a few failed tests


def run(
    arguments: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Run Python with `arguments`, from the project's root.

    Args:
        limit_s: after this many seconds it is killed, with every process that it has started.
        on_record: gets each line of JSON as it comes.
    Returns:
        seconds; exit_status (124: killed; below 0: by that signal); records, its lines of JSON;
        and, where it failed, error: the last lines of what else it said.
    """
    started = time.perf_counter()
    records: list[dict[str, Any]] = []
    others: list[str] = []

    def read(out: Iterable[str]) -> None:
        for line in out:
            record = _record_of(line)
            if record is None:
                others.append(line.rstrip("\n"))
            else:
                records.append(record)
                on_record(record)

    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=err, cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=read, args=(process.stdout,))
        reader.start()
        try:
            status, said = process.wait(limit_s), []
        except subprocess.TimeoutExpired:
            status, said = RAN_TOO_LONG, [f"stopped after {limit_s:.0f} s"]
        finally:
            _end(process)
            reader.join()
        err.seek(0)
        warned = err.read().splitlines()
    seconds = round(time.perf_counter() - started, 1)
    part = {"seconds": seconds, "exit_status": status, "records": records}
    said += [*others[-_KEPT_LINES:], *warned[-_KEPT_LINES:]]
    return part if not status else {**part, "error": said}


def _end(process: subprocess.Popen[str]) -> None:
    """End a part and what it started; all of it is in one process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _record_of(line: str) -> Any:
    """A line of JSON; None for other lines, and where the process ended in the middle of one."""
    with contextlib.suppress(ValueError):
        return json.loads(line) if line[:1] == "{" else None
