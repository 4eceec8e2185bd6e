"""--tensor-parallel-size: the command starts itself once a rank, and watches them."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from compilespec.errors import InvalidOption

POLL_S = 0.2
GRACE_S = 5.0  # seconds that ranks have to say why they end


def starts_ranks(args: argparse.Namespace) -> bool:
    """True where this process must start the ranks of the job and is no rank itself."""
    size = getattr(args, "tensor_parallel_size", None)
    if size is not None and size < 1:
        raise InvalidOption(f"tensor_parallel_size must be a positive integer; got {size}")
    return size is not None and size > 1 and "RANK" not in os.environ


def is_first_rank() -> bool:
    """True where this process is rank 0 of a job, or in no job."""
    return os.environ.get("RANK", "0") == "0"


def start_ranks(argv: Sequence[str], size: int) -> int:
    """Run the command as `size` processes; the exit code of the first that fails, else 0.

    Rank 0 has this process's input and output; of others the last line is shown if they fail.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(1, size)]
        return _run(argv, size, port, logs)


def _run(argv: Sequence[str], size: int, port: int, logs: Sequence[IO[str]]) -> int:
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        streams: dict[str, Any] = {}
        if rank:
            quiet = subprocess.DEVNULL
            streams = {"stdin": quiet, "stdout": quiet, "stderr": logs[rank - 1]}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "compilespec", *argv],
                env={
                    **os.environ,
                    "MASTER_ADDR": "127.0.0.1",
                    **{name: str(value) for name, value in place.items()},
                },
                **streams,
            )
        )
    try:
        return _watch(ranks, logs)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _watch(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[IO[str]]) -> int:
    """Wait until all end; where one fails, the others have a few seconds."""
    while True:
        try:
            codes = [process.poll() for process in ranks]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return _end(ranks, logs, failed[0])
            if all(code == 0 for code in codes):
                return 0
            time.sleep(POLL_S)
        except KeyboardInterrupt:  # the ranks received it too
            continue


def _end(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[IO[str]], failed: int) -> int:
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(process.poll() is None for process in ranks):
        time.sleep(POLL_S)
    for rank, log in enumerate(logs, 1):
        log.seek(0)
        lines = log.read().strip().splitlines()
        if lines and (rank == failed or ranks[rank].poll()):
            print(f"rank {rank}: {lines[-1]}", file=sys.stderr)
    code = ranks[failed].returncode
    if code < 0:
        print(f"rank {failed} was ended by signal {-code}, and the job with it", file=sys.stderr)
    return code if code > 0 else 128 - code
