"""The command line.  Nothing heavy is imported before a command runs, so that `--help` is quick.

Exit codes: 0 done, 2 bad input (one line on stderr), 130 interrupted (what was made so far is
printed).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from compilespec.cli import bench, compile, dump, generate, methods
from compilespec.errors import SpecError

COMMANDS = (generate, dump, bench, compile, methods)
BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    # transformers imports torchao where it is installed, whose import warns of torch's plans and of
    # libraries for other devices.
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except SpecError as error:
        print(f"compilespec: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("compilespec: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compilespec",
        description="Compile a model and a drafter into one program that decodes speculatively.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
