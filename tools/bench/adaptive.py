"""Adaptive K against every fixed K, with drafts that never match and drafts that always do.

The ways decode the same prompts by turns.  "never": the demo's target with a head of random
weights; its tokens are checked against plain decoding's.  "always": the demo's own head with all
drafts accepted by force: the text is nonsense, but the work is that of a perfect drafter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import compilespec
from compilespec import SamplingParams
from compilespec.methods import eagle3
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tools.bench import report
from tools.bench.prompts import load_prompts

COUNTS = (0, 2, 5)
LIMIT = 0.95  # share of the speed of the best fixed K
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"spec": "none"},
    **{f"K={k}": {"spec": "eagle3", "num_draft_tokens": k} for k in COUNTS if k},
    "adaptive": {"spec": "eagle3", "num_draft_tokens": COUNTS},
}


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if adaptive K misses the limit, else 0."""
    torch.set_num_threads(options.threads)
    prompts = list(load_prompts(max(options.batch)).values())
    result: dict[str, Any] = {
        "benchmark": "adaptive K", **report.environment(), "counts": COUNTS, "limit": LIMIT,
        "max_new_tokens": options.max_new_tokens, "cases": [],
    }  # fmt: skip
    for case in ("never", "always"):
        engines = {name: _engine(case, way, options, console) for name, way in WAYS.items()}
        try:
            if case == "never":
                _check(engines, prompts, options)
            for batch in options.batch:
                result["cases"].append(_measure(case, engines, prompts[:batch], options))
        finally:
            for engine in engines.values():
                engine.close()
    _print(console, result["cases"])
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(any(case["adaptive_to_best"] < LIMIT for case in result["cases"]))


def _engine(case: str, way: dict[str, Any], options: argparse.Namespace, console: Console) -> Any:
    extra: dict[str, Any] = {}
    if way["spec"] != "none" and case == "always":
        extra["force_num_accepted"] = COUNTS[-1]
    elif way["spec"] != "none":
        target = load_target("demo")
        info = describe_target(trace_target(target.model), target)
        last = info.num_layers
        extra["draft"] = eagle3.random_head(
            info, aux_layers=(2, last // 2, last - 3), draft_vocab_size=info.vocab_size // 2
        )
    console.print(f"{case}: compiling {way}")
    return compilespec.compile(
        "demo", max_batch_size=max(options.batch), backend=options.backend, **way, **extra
    )


def _check(engines: dict[str, Any], prompts: list[str], options: argparse.Namespace) -> None:
    """Check that tokens are equal: the CPU kernels give a row the same bits at every K.

    Raises: SystemExit.
    """
    texts = {
        name: [o.token_ids for o in engine.generate(prompts, _params(options))]
        for name, engine in engines.items()
    }
    wrong = [name for name, tokens in texts.items() if tokens != texts["plain"]]
    if wrong:
        raise SystemExit(f"error: {', '.join(wrong)} and plain decoding give other tokens")


def _params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)


def _measure(
    case: str, engines: dict[str, Any], prompts: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Decode times only, by turns.  The ratio to the best fixed K is the median of the rounds'
    ratios, because a slow spell of the machine slows all ways of a round alike.  Each round begins
    with another way, so that none always follows the same one.
    """
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(options.rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            engine = engines[name]
            before, started = engine.stats(), time.perf_counter()
            outputs = engine.generate(prompts, _params(options))
            elapsed = time.perf_counter() - started
            prefill = (engine.stats().prefill_ms - before.prefill_ms) / 1e3
            tokens = sum(len(output.token_ids) - 1 for output in outputs)
            if number:  # the first round warms up, and lets the policy learn
                speeds[name].append(tokens / (elapsed - prefill))
    fixed = [name for name in engines if name != "adaptive"]
    best = max(fixed, key=lambda name: statistics.median(speeds[name]))
    ratios = [one / other for one, other in zip(speeds["adaptive"], speeds[best], strict=True)]
    return {
        "case": case,
        "batch": len(prompts),
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "best_fixed": best,
        "adaptive_to_best": statistics.median(ratios),
        "adaptive_to_best_by_round": ratios,
        "policy": engines["adaptive"].plan()["adaptive"],
    }


def _print(console: Console, cases: list[dict[str, Any]]) -> None:
    table = Table(title="decode tokens per second, medians")
    for column in ("drafts match", "batch", *WAYS, "adaptive / best fixed"):
        table.add_column(column, justify="right")
    for case in cases:
        speeds = case["tokens_per_s"]
        table.add_row(
            case["case"], str(case["batch"]), *(f"{speeds[name]:.0f}" for name in WAYS),
            f"{case['adaptive_to_best']:.3f}",
        )  # fmt: skip
    console.print(table)
