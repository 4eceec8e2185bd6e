"""Chains of drafts against trees of them: tokens a step, and tokens a second.

    python -m tools.bench.trees           written to results/trees.json
    python -m tools.bench.trees --real    SmolLM2-135M-Instruct: results/trees-real.json

One engine a shape, the same greedy prompts for all by turns, batch by batch; tokens are checked
against plain decoding first.  A tree of N nodes verifies N + 1 rows a request and step, so what
a step costs is printed beside what it gives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import compilespec
from compilespec import DraftTree, SamplingParams
from tools.bench import real, report
from tools.bench.prompts import load_prompts
from tools.bench.speed import make_batches
from tools.real_models import SMOLLM2

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain of 3": {"num_draft_tokens": 3},
    "chain of 5": {"num_draft_tokens": 5},
    "tree of 8": {"draft_tree": DraftTree(top_k=3, depth=4, num_nodes=8)},
    "tree of 16": {"draft_tree": DraftTree(top_k=4, depth=5, num_nodes=16)},
    "tree of 32": {"draft_tree": DraftTree(top_k=6, depth=6, num_nodes=32)},
    "tree of 60": {"draft_tree": DraftTree(top_k=10, depth=7, num_nodes=60)},
}


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a shape gives other tokens than plain decoding, else 0."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    shapes = {n: s for n, s in SHAPES.items() if n == "plain" or (options.only or "") in n}
    engines = {}
    for name, shape in shapes.items():
        console.print(f"compiling {name}")
        engines[name] = _compile(options, shape)
    result: dict[str, Any] = {
        "benchmark": "trees", **report.environment(), "model": Path(options.model).name,
        "spec": options.spec, "max_new_tokens": options.max_new_tokens, "batches": {},
    }  # fmt: skip
    for size in options.batch:
        result["batches"][size] = _measure(engines, size, options)
        _print(console, size, result["batches"][size])
    console.print(f"written to {report.write_json(options.name, result)}")
    found = [one for shapes in result["batches"].values() for one in shapes.values()]
    return int(any(one["num_wrong"] or one["num_recompiles"] for one in found))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.trees")
    parser.add_argument("--real", action="store_true", help="the model of `make smollm2`, its head")
    parser.add_argument("--model", default="demo", help="a checkpoint directory, or demo")
    parser.add_argument("--draft", help="the drafter's directory")
    parser.add_argument("--spec", default="eagle3")
    parser.add_argument("--dtype", help="such as float32: in bfloat16 near ties may fall otherwise")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="only shapes whose name contains this, and plain")
    parser.add_argument("--name", help="results/NAME.json (default: trees or trees-real)")
    options = parser.parse_args(arguments)
    options.name = options.name or ("trees-real" if options.real else "trees")
    if options.real:
        options.model, options.draft = str(SMOLLM2), str(real.HEAD)
    return options


def _compile(options: argparse.Namespace, shape: dict[str, Any]) -> Any:
    keywords: dict[str, Any] = {
        "max_batch_size": max(options.batch), "backend": options.backend,
        "enable_prefix_caching": False, **shape,
    }  # fmt: skip
    if options.dtype:
        keywords["dtype"] = getattr(torch, options.dtype)
    if shape and options.draft:
        keywords["draft"] = options.draft
    return compilespec.compile(options.model, options.spec if shape else "none", **keywords)


def _measure(engines: dict[str, Any], size: int, options: argparse.Namespace) -> dict[str, Any]:
    """By shape: medians over the batches and rounds; the first round warms up."""
    prompts: list[Any] = list(
        real.read_prompts(SMOLLM2, options.num_prompts).values()
        if options.real
        else load_prompts(options.num_prompts).values()
    )
    params = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    step_ms: dict[str, list[float]] = {name: [] for name in engines}
    emitted: dict[str, list[int]] = {name: [] for name in engines}
    wrong = dict.fromkeys(engines, 0)
    for number in range(options.rounds + 1):
        for batch in make_batches(prompts, size):
            tokens: dict[str, Any] = {}
            for name, engine in engines.items():
                before, start = engine.stats(), time.perf_counter()
                outputs = engine.generate(batch, params)
                after, ms = engine.stats(), (time.perf_counter() - start) * 1e3
                tokens[name] = [one.token_ids for one in outputs]
                if not number:
                    wrong[name] += tokens[name] != tokens["plain"]
                    emitted[name] += [n for one in outputs for n in one.emitted_per_step]
                    continue
                ms -= after.prefill_ms - before.prefill_ms
                speeds[name].append(sum(len(one) - 1 for one in tokens[name]) / ms * 1e3)
                steps = _num_steps(after) - _num_steps(before)
                step_ms[name].append(ms / max(1, steps))
    return {
        name: {
            "acceptance_length": statistics.mean(emitted[name]),
            "tokens_per_s": statistics.median(speeds[name]),
            "step_ms": statistics.median(step_ms[name]),
            "num_wrong": wrong[name],
            "num_recompiles": engine.stats().num_recompiles,
        }
        for name, engine in engines.items()
    }


def _num_steps(stats: Any) -> int:
    return sum(stats.num_decodes_by_bucket.values())


def _print(console: Console, size: int, shapes: dict[str, Any]) -> None:
    table = Table(title=f"batch {size}")
    for column in ("shape", "tokens a step", "step ms", "tokens/s", "of plain", "wrong batches"):
        table.add_column(column, justify="right")
    for name, one in shapes.items():
        table.add_row(
            name, f"{one['acceptance_length']:.2f}", f"{one['step_ms']:.2f}",
            f"{one['tokens_per_s']:.0f}",
            f"{one['tokens_per_s'] / shapes['plain']['tokens_per_s']:.2f}", str(one["num_wrong"]),
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
