"""Parts of a long check, each in a separate process: its output is kept however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RAN_TOO_LONG = 124
_KEPT_LINES = 200  # a few failed tests


def run(
    arguments: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run Python with `arguments`, from the project's root.

    Args:
        limit_s: after this many seconds it is killed, with every process that it has started.
    Returns:
        seconds; exit_status (124: killed; below 0: by that signal); records, its lines of JSON;
        and, where it failed, error: the last lines of what else it said.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=out, stderr=err, cwd=ROOT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        )  # fmt: skip
        try:
            status, said = process.wait(limit_s), []
        except subprocess.TimeoutExpired:
            status, said = RAN_TOO_LONG, [f"stopped after {limit_s:.0f} s"]
        finally:
            _end(process)
        seconds = round(time.perf_counter() - started, 1)
        out.seek(0)
        err.seek(0)
        printed, warned = out.read().splitlines(), err.read().splitlines()
    part = {"seconds": seconds, "exit_status": status, "records": list(_records(printed))}
    others = [line for line in printed if line[:1] != "{"]
    said += [*others[-_KEPT_LINES:], *warned[-_KEPT_LINES:]]
    return part if not status else {**part, "error": said}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and what it started; all of it is in one process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _records(lines: Sequence[str]) -> Iterator[Any]:
    for line in lines:
        if line[:1] != "{":
            continue
        try:
            yield json.loads(line)
        except ValueError:  # the process ended in the middle of a line
            continue
