"""Sweep over every causal language model of the installed transformers, and every model of images.

    python -m tests.families                    all; docs/families.md is written
    python -m tests.families llama4 phimoe      these alone; the page stays
    python -m tests.families --images           the text use of models of images and text alone
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
from tests.families.check import (
    CAUSAL,
    CRASHED,
    ROTARY,
    WITH_IMAGES,
    WRONG,
    Verdict,
    check_family,
)
from tests.families.page import write_page

LIMIT_S = 600  # of one family


def names_of_families(auto: str) -> list[str]:
    """The families of an auto class; those with images, without the classes of causal ones."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if auto == CAUSAL:
        return list(causal)
    others = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    return [family for family, name in others if causal.get(family) != name]


def sweep(
    families: Sequence[str], jobs: int, log: Path | None, tables: tuple[str, ...], auto: str
) -> list[Verdict]:
    """Verdicts of the families of an auto class, each in a process of its own."""
    context = multiprocessing.get_context("fork")  # everything is imported once
    todo, running, verdicts = list(families), {}, []
    while todo or running:
        while todo and len(running) < jobs:
            family = todo.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(family, there, tables, auto))
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
                verdict = Verdict(family=family, verdict=CRASHED, reason=why, auto=auto)
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


def _child(family: str, answer: Connection, tables: tuple[str, ...], auto: str) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1), os.dup2(nothing, 2)
    answer.send(check_family(family, rope_types=tables, auto=auto))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--images", action="store_true", help="models of images, over text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--log", type=Path, help="a file that gets one JSON line a family")
    parser.add_argument("--tables", nargs="+", default=ROTARY[:2], choices=ROTARY)
    parser.add_argument("--page", type=Path, default=Path("docs/families.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _ = compilespec.compile  # imports what every child needs
    transformers.logging.set_verbosity_error()
    verdicts = []
    is_all = not arguments.families and not arguments.images
    for auto in (CAUSAL, WITH_IMAGES) if is_all else (WITH_IMAGES if arguments.images else CAUSAL,):
        families = arguments.families or names_of_families(auto)
        tables = tuple(arguments.tables)
        verdicts += sweep(families, arguments.jobs, arguments.log, tables, auto)
    if is_all:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        write_page(verdicts, versions, arguments.page)
    bad = [one for one in verdicts if one.verdict in (WRONG, CRASHED)]
    print(f"{len(verdicts)} families, {len(bad)} wrong or crashed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
