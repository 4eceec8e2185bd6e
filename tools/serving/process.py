"""`compilespec serve` in a separate process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 60


@contextlib.contextmanager
def served(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Serve with these arguments of the command on a free port; gives the server's address.

    Raises: RuntimeError: the server did not start; the message ends with its log.
    """
    command = [sys.executable, "-m", "compilespec", "serve", "--port", "0", "--quiet", *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
    )  # fmt: skip
    try:
        yield _address(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)  # reads the log's end, too
        finally:
            process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        if found := re.search(r"serving on (http\S+)", line):
            return found[1]
        log.append(line)
    raise RuntimeError(f"the server ended before it served:\n{''.join(log)[-2000:]}")
