"""Sweep over every causal language model of the installed transformers.

    python -m tests.families                    all; docs/families.md is written
    python -m tests.families llama4 phimoe      these alone, in this process
    python -m tests.families --jobs 4           four processes at once

Exits with 1 if a family is wrong, or fails by another error than one of compilespec in one line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers

import compilespec
from tests.families.check import CRASHED, ROTARY, WRONG, Verdict, check_family
from tests.families.page import write_page

LIMIT_S = 600  # of one family


def names_of_families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def sweep(
    families: Sequence[str], jobs: int, log: Path | None, tables: tuple[str, ...]
) -> list[Verdict]:
    """Verdicts of the families, each in a process of its own."""
    context = multiprocessing.get_context("fork")  # everything is imported once
    todo, running, verdicts = list(families), {}, []
    while todo or running:
        while todo and len(running) < jobs:
            family = todo.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(family, there, tables))
            process.start()
            there.close()
            running[family] = (process, here, time.monotonic())
        for family, (process, here, since) in list(running.items()):
            is_late = time.monotonic() - since > LIMIT_S
            if process.is_alive() and not here.poll() and not is_late:
                continue
            try:
                verdict = here.recv() if here.poll() else None
            except EOFError:
                verdict = None
            if verdict is None:
                why = f"no answer in {LIMIT_S} s" if is_late else f"ended with {process.exitcode}"
                verdict = Verdict(family=family, verdict=CRASHED, reason=why)
            process.kill()
            process.join()
            del running[family]
            verdicts.append(verdict)
            seconds = time.monotonic() - since
            print(
                f"{family:28} {verdict.verdict:10} {seconds:5.0f} s  {verdict.reason[:150]}",
                flush=True,
            )
            if log:
                with log.open("a") as lines:
                    lines.write(json.dumps(vars(verdict)) + "\n")
        time.sleep(0.05)
    return verdicts


def _child(family: str, answer: Connection, tables: tuple[str, ...]) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1), os.dup2(nothing, 2)
    answer.send(check_family(family, rope_types=tables))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--log", type=Path, help="a file that gets one JSON line a family")
    parser.add_argument("--tables", nargs="+", default=ROTARY[:2], choices=ROTARY)
    parser.add_argument("--page", type=Path, default=Path("docs/families.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _ = compilespec.compile  # imports what every child needs
    transformers.logging.set_verbosity_error()
    families = arguments.families or names_of_families()
    verdicts = sweep(families, arguments.jobs, arguments.log, tuple(arguments.tables))
    if not arguments.families:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        write_page(verdicts, versions, arguments.page)
    bad = [one for one in verdicts if one.verdict in (WRONG, CRASHED)]
    print(f"{len(verdicts)} families, {len(bad)} wrong or crashed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
