"""The command line.  Nothing heavy is imported before a command runs, so that `--help` is quick.

Exit codes: 0 done, 1 `doctor` misses something, 2 bad input (one line on stderr), 130 interrupted
(the output so far is printed), 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from compilespec import __version__
from compilespec.cli import (
    bench,
    build,
    chat,
    compile,
    completion,
    doctor,
    drafters,
    dump,
    generate,
    methods,
    serve,
    train,
    why,
)
from compilespec.cli.flags import FlagParser, in_flags, read_arguments
from compilespec.cli.ranks import start_ranks, starts_ranks
from compilespec.errors import SpecError

COMMANDS = (
    generate, chat, serve, why, dump, bench, compile, build, methods, drafters, train, doctor,
    completion,
)  # fmt: skip
BAD_INPUT, INTERRUPTED, CUT_OFF = 2, 130, 141

FIRST_WORDS = """\
compilespec decodes a language model's text faster, and changes none of it.  To begin:

  compilespec doctor              what this machine has, and what it lacks
  compilespec demo                the package's tiny model: speculation against plain
  compilespec chat MODEL          a conversation with a model: a directory, org/name or a GGUF file
  compilespec serve MODEL         the same over HTTP, in OpenAI's protocol

The first start of a model compiles for some minutes; later ones do not.
compilespec --help lists every command."""
DEMO = ("generate", "--model", "demo", "--spec", "eagle3", "--compare")  # `compilespec demo`

# GNU OpenMP's threads look for work this often before they sleep: about 0.2 ms. Its own default is
# sixty times as long, and beside a busy process a step then waits for time slices.
SPIN_COUNT = "5000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, or say the first words; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        print(FIRST_WORDS)
        return 0
    if given[0] == "demo":
        given[:1] = DEMO
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported
    args = argparse.Namespace()
    try:
        args = read_arguments(build_parser(), given)
        if args.run in (bench.run, generate.run, serve.run) and starts_ranks(args):
            return start_ranks(given, args.tensor_parallel_size)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except SpecError as error:
        line = in_flags(" ".join(str(error).split()), args)
        print(f"compilespec: error: {line}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("compilespec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough; the buffered rest is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="compilespec",
        description="Compile a model and a drafter into one program that decodes speculatively.",
    )
    parser.add_argument("--version", action="version", version=f"compilespec {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
