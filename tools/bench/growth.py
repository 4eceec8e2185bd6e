"""How the price of a decode step grows with context and batch, beside llama.cpp and vLLM.

    python -m tools.bench.growth            written to results/growth.json

SmolLM2-135M-Instruct in bfloat16, plain greedy decoding: batch 1 at contexts of up to 8k tokens,
and batches of up to 32 at a short one.  All read the prompts once and then decode from there by
turns; llama.cpp runs where llama-cpp-python and gguf are installed, vLLM where `--guest-python` has
it.  The first token of every row is compared: rounding parts a few of them, and more of the later
ones.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

import compilespec
from compilespec import SamplingParams
from tools.bench import report
from tools.bench.guests import GuestWay
from tools.bench.llama_cpp import Sequences
from tools.bench.real import GUEST_HELP, read_prompts
from tools.bench.speed import load_model
from tools.bench.ways import Setup, Unavailable
from tools.real_models import SMOLLM2

LEAST_EQUAL = 0.75  # of the rows' first tokens


class Way(Protocol):
    """Prompts that were read, from which it can decode again and again."""

    name: str

    def read(self, prompts: Sequence[list[int]]) -> None: ...

    def decode(self, num_steps: int) -> tuple[float, list[list[int]]]:
        """Milliseconds a step, and what each row was given."""
        ...

    def close(self) -> None: ...


class Compilespec:
    """An engine; the prefix cache keeps the prompts."""

    name = "compilespec"

    def __init__(self, model: Path, *, batch: int, length: int) -> None:
        self.engine: Any = compilespec.compile(
            str(model), "none", dtype=torch.bfloat16, max_batch_size=batch, max_seq_len=length
        )
        self.prompts: Sequence[list[int]] = ()

    def read(self, prompts: Sequence[list[int]]) -> None:
        self.prompts = prompts
        self.decode(1)

    def decode(self, num_steps: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(max_new_tokens=num_steps + 1, ignore_eos=True)
        before = self.engine.stats().decode_ms
        outputs = self.engine.generate(self.prompts, params)
        ms = (self.engine.stats().decode_ms - before) / num_steps
        return ms, [list(output.token_ids) for output in outputs]

    def close(self) -> None:
        self.engine.close()


class Guest:
    """vLLM, in its own process; its prefix cache keeps the prompts, but for a block that it reads
    again: the time of a single token is taken off.
    """

    name = "vLLM"

    def __init__(self, options: argparse.Namespace, *, batch: int, length: int) -> None:
        setup = Setup(
            model_dir=options.model, model=torch.nn.Module(), max_new_tokens=1,
            max_batch_size=batch, num_threads=options.threads, draft=None, max_seq_len=length,
        )  # fmt: skip
        self._way = GuestWay(setup, self.name, "vllm", options.guest_python, keeps_prompts=True)
        self.prompts: list[list[int]] = []

    def read(self, prompts: Sequence[list[int]]) -> None:
        self.prompts = list(prompts)
        self._way.generate(self.prompts)

    def decode(self, num_steps: int) -> tuple[float, list[list[int]]]:
        begun = time.perf_counter()
        self._way.generate(self.prompts)
        first = time.perf_counter()
        tokens = self._way.generate(self.prompts, num_steps + 1)
        return 1e3 * (time.perf_counter() - 2 * first + begun) / num_steps, tokens

    def close(self) -> None:
        self._way.close()


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if too many rows begin with other tokens."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 100)
    result: dict[str, Any] = {"benchmark": "growth", **report.environment(), "rows": []}
    text = list(itertools.chain(*read_prompts(options.model, 8).values()))
    for row in measure(options, text, console):
        result["rows"].append(row)
        report.write_json(options.name, result)  # what there is, if it is ended
    show(console, result["rows"])
    equal = sum(row["num_equal"] for row in result["rows"])
    is_wrong = equal < LEAST_EQUAL * sum(row["batch"] for row in result["rows"])
    if is_wrong:
        console.print("[red]too many rows begin with other tokens[/]")
    return int(is_wrong)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.growth")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="(default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024, 4096, 8000])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--batch-context", type=int, default=256, help="of the batches")
    parser.add_argument("--steps", type=int, default=32, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--guest-python", default=sys.executable, metavar="PYTHON", help=GUEST_HELP)
    parser.add_argument("--name", default="growth", help="results/NAME.json")
    return parser.parse_args(arguments)


def measure(
    options: argparse.Namespace, text: list[int], console: Console
) -> Iterator[dict[str, Any]]:
    """The row of each point."""
    by_batch = [(1, context) for context in options.context]
    by_context = [(batch, options.batch_context) for batch in options.batch]
    for points in (by_batch, by_context):
        if not points:
            continue
        most, longest = (max(column) for column in zip(*points, strict=True))
        ways = build(options, most, longest + options.steps + 2, console)
        for batch, context in points:
            row = measure_point(ways, batch, context, text, options)
            console.print(row)
            yield row
        for way in ways:
            way.close()


def build(options: argparse.Namespace, batch: int, length: int, console: Console) -> list[Way]:
    ways: list[Way] = [Compilespec(options.model, batch=batch, length=length)]
    try:
        ways.append(
            Sequences(
                load_model(options.model, "bfloat16"), batch=batch, length=length,
                num_threads=options.threads,
            )
        )  # fmt: skip
    except Unavailable as reason:
        console.print(f"skipped llama.cpp: {reason}")
    try:
        ways.append(Guest(options, batch=batch, length=length))
    except Unavailable as reason:
        console.print(f"skipped vLLM: {reason}")
    return ways


def measure_point(
    ways: Sequence[Way], batch: int, context: int, text: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians of the rounds, and how many rows begin alike."""
    prompts = [
        list(itertools.islice(itertools.cycle(text[7 * row :] + text[: 7 * row]), context))
        for row in range(batch)
    ]
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    begun: dict[str, list[int]] = {}
    for way in ways:
        way.read(prompts)
    for number in range(options.rounds):
        for way in ways if number % 2 else reversed(ways):
            ms, rows = way.decode(options.steps)
            times[way.name].append(ms)
            begun[way.name] = [row[0] for row in rows]
    return {
        "batch": batch, "context": context,
        "step_ms": {name: statistics.median(values) for name, values in times.items()},
        "fastest_ms": {name: min(values) for name, values in times.items()},
        "num_equal": sum(len(set(tokens)) == 1 for tokens in zip(*begun.values(), strict=True)),
    }  # fmt: skip


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Steps, and what each costs beside the first of its kind."""
    names = list(rows[0]["step_ms"]) if rows else []
    table = Table(title="milliseconds of a decode step (times that of the shortest)")
    for column in ("batch", "context", *names, "rows alike"):
        table.add_column(column, justify="right")
    for row in rows:
        least = next(one for one in rows if one["batch"] == 1)["step_ms"]
        cells = [
            f"{row['step_ms'][name]:.1f} ({row['step_ms'][name] / least[name]:.2f})"
            for name in names
        ]
        table.add_row(str(row["batch"]), str(row["context"]), *cells, str(row["num_equal"]))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
