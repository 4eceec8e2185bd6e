"""A process that serves the toy program: prints its address, then what it logs as a warning.

python -m tests.support.toy_server [MAX_WAITING]
"""

from __future__ import annotations

import logging
import sys

from compilespec.serving import ServerOptions, run
from compilespec.serving.options import Binding
from tests.support.live_server import toy_engine

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    options = ServerOptions(
        model_names=("toy",),
        api_keys=("key",),
        max_waiting=int(sys.argv[1]),
        max_body_bytes=20_000,
        write_timeout_s=10,
    )
    sys.exit(run(toy_engine(), options, Binding(port=0, drain_timeout_s=60)))
