"""Speeds with each choice of CPU kernels, by turns in one run.

    python -m tools.bench.levels            written to results/levels.json

A process for every level that this CPU runs (`COMPILESPEC_CPU_LEVEL`), each with engines in
bfloat16, in int8, and in int8 on both sides; they take turns.  A level's rows must be the same
alone and in company; between levels the last bit may differ, so that is counted and no more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from itertools import chain, cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from compilespec.ops import _levels
from tools.bench import report
from tools.bench.real import PREFILL_TOKENS, read_prompts
from tools.real_models import SMOLLM2

WEIGHTS = {"bf16": None, "int8": "int8", "int8_dynamic": "int8_dynamic"}
FIGURES = ("decode, batch 1", "decode, batch 8", f"prefill of {PREFILL_TOKENS}")


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a level's rows differ alone and in company."""
    options = parse(arguments)
    names = [level.name for level in _levels.fitting(_levels.cpu_features())]
    workers = {name: Worker(name, options) for name in options.level or names}
    result: dict[str, Any] = {"benchmark": "levels", **report.environment(), "rows": []}
    for weights in WEIGHTS:
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for _ in range(options.rounds + 1):
            for name, worker in workers.items():
                samples[name].append(worker.ask(weights))
        first = next(iter(samples.values()))[0]["tokens"]
        for name, (warm, *timed) in samples.items():
            speeds = {key: statistics.median(one[key] for one in timed) for key in FIGURES}
            same = sum(a == b for a, b in zip(warm["tokens"], first, strict=True))
            independent = all(one["independent"] for one in (warm, *timed))
            result["rows"].append(
                {"weights": weights, "level": name, "tokens_per_s": speeds,
                 "as_the_best_level": same, "of": len(first), "independent": independent}
            )  # fmt: skip
    for worker in workers.values():
        worker.close()
    console = Console(width=None if sys.stdout.isatty() else 110)
    show(console, result["rows"])
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(not all(row["independent"] for row in result["rows"]))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.levels")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="(default: %(default)s)")
    parser.add_argument("--level", nargs="+", help="(default: all that this CPU runs)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="levels", help="results/NAME.json")
    return parser.parse_args(arguments)


class Worker:
    """A process that has loaded the kernels of a level."""

    def __init__(self, level: str, options: argparse.Namespace) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, options), daemon=True)
        with mock.patch.dict(os.environ, {_levels.VARIABLE: level}):  # it inherits it
            self._process.start()
        theirs.close()

    def ask(self, weights: str) -> dict[str, Any]:
        """Measure once.  Raises: EOFError if the process has failed; it says why itself."""
        self._connection.send(weights)
        answer: dict[str, Any] = self._connection.recv()
        return answer

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def serve(connection: Connection, options: argparse.Namespace) -> None:
    """Answer with measurements until None comes."""
    import torch

    import compilespec
    from compilespec.ops import _build

    torch.set_num_threads(options.threads)
    if not _build.load_kernels():
        raise SystemExit("the kernels did not load")
    prompts = list(read_prompts(options.model, 8).values())
    engines: dict[str, Any] = {}
    while (weights := connection.recv()) is not None:
        if weights not in engines:
            engines[weights] = compilespec.compile(
                str(options.model), "none", dtype=torch.bfloat16, max_batch_size=len(prompts),
                quantize=WEIGHTS[weights], enable_prefix_caching=False, max_seq_len=2048,
            )  # fmt: skip
        connection.send(measure(engines[weights], prompts, options.max_new_tokens))
    for engine in engines.values():
        engine.close()


def measure(engine: Any, prompts: Sequence[list[int]], num_new: int) -> dict[str, Any]:
    """The figures, in tokens a second, and the tokens of every prompt alone."""
    from compilespec import SamplingParams

    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    long_prompt = list(islice(cycle(chain(*prompts)), PREFILL_TOKENS))
    before = engine.stats()
    alone = [list(engine.generate([prompt], params)[0].token_ids) for prompt in prompts]
    one = engine.stats()
    together = [list(output.token_ids) for output in engine.generate(prompts, params)]
    eight = engine.stats()
    engine.generate([long_prompt], SamplingParams(max_new_tokens=1))
    long = engine.stats()
    num_decoded = len(prompts) * (num_new - 1)
    rates = (
        num_decoded / (one.decode_ms - before.decode_ms),
        num_decoded / (eight.decode_ms - one.decode_ms),
        PREFILL_TOKENS / (long.prefill_ms - eight.prefill_ms),
    )
    return {
        **{name: 1e3 * rate for name, rate in zip(FIGURES, rates, strict=True)},
        "tokens": alone,
        "independent": alone == together,
    }


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="tokens a second")
    for column in ("weights", "level", *FIGURES, "texts as of the best level"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = (f"{row['tokens_per_s'][key]:,.0f}" for key in FIGURES)
        same = f"{row['as_the_best_level']} of {row['of']}"
        table.add_row(row["weights"], row["level"], *speeds, same)
        if not row["independent"]:
            console.print(f"[red]{row['weights']}, {row['level']}: rows differ in company[/]")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
