"""Parts of a check in separate processes: what they printed is kept however they end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tools import parts


def run(code: str, limit_s: float = 60) -> dict:
    return parts.run(["-c", code], limit_s)


def is_alive(status: Path) -> bool:
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


def test_records_of_a_part() -> None:
    done = run('print(\'{"a": 1}\\nwords\\n{"a": [2]}\')')
    assert done == {"seconds": done["seconds"], "exit_status": 0, "records": [{"a": 1}, {"a": [2]}]}


def test_a_part_that_fails() -> None:
    done = run("print('{\"a\": 1}'); print('one failed'); raise SystemExit('why')")
    assert (done["exit_status"], done["records"]) == (1, [{"a": 1}])
    assert done["error"] == ["one failed", "why"]


def test_a_part_that_crashes_in_the_middle_of_a_record() -> None:
    done = run('import os; os.write(1, b\'{"a": 1}\\n{"b": \'); os.abort()')
    assert (done["exit_status"], done["records"]) == (-signal.SIGABRT, [{"a": 1}])


def test_a_part_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """Its child notes its own id; both would sleep for longer than the test waits."""
    note = tmp_path / "child"
    code = (
        "import subprocess, sys, time; print('{\"a\": 1}', flush=True); "
        f"subprocess.Popen(['sh', '-c', 'echo $$ > {note}; sleep 600']); time.sleep(600)"
    )
    started = time.monotonic()
    done = run(code, limit_s=3)
    assert time.monotonic() - started < 60
    assert (done["exit_status"], done["records"]) == (parts.RAN_TOO_LONG, [{"a": 1}])
    assert done["error"] == ["stopped after 3 s"]
    child = Path("/proc", note.read_text().strip(), "status")
    while is_alive(child):  # a signal takes a moment
        assert time.monotonic() - started < 120
        time.sleep(0.05)


def test_the_environment_of_a_part() -> None:
    code = "import json, os; print(json.dumps({k: os.environ[k] for k in ('HOME', 'MINE')}))"
    done = parts.run(["-c", code], 60, {"MINE": "x"})
    assert done["records"] == [{"HOME": os.environ["HOME"], "MINE": "x"}]
