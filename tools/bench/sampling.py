"""The cost of sampling in a step: the same engine with greedy and with sampled requests, by turns.

A step with sampled rows verifies as many tokens as a greedy one, so milliseconds per step are
compared, not tokens per second.  The kinds run one after the other on each group of prompts, and
the first one rotates.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench import report
from tools.bench.measure import quantiles
from tools.bench.prompts import encode_prompts, load_prompts
from tools.bench.speed import find_model, make_batches

GREEDY = "greedy"
LIMIT = 1.15  # largest ratio to greedy steps for the kinds in GATED
GATED = ("T=1",)
KINDS: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "T=1": {"temperature": 1.0},
    "T=1, top-k 50, top-p 0.95, min-p 0.02": {
        "temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02,
    },
    "T=1, three penalties, bias": {
        "temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "logit_bias": {5: 1.0},
    },
}  # fmt: skip
NUM_STEPS, NUM_WARM = 24, 4


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if a gate is missed or something recompiled, else 0."""
    import torch

    import compilespec

    torch.set_num_threads(options.threads)
    directory = find_model(options.model)
    result: dict[str, Any] = {"benchmark": "sampling", **report.environment(), "runs": []}
    failed = False
    for spec, rule in (("none", "auto"), ("eagle3", "auto"), ("eagle3", "rejection")):
        if options.only and options.only not in f"{spec} {rule}":
            continue
        keywords: dict[str, Any] = {"acceptance": rule} if rule != "auto" else {}
        if spec != "none":
            keywords["num_draft_tokens"] = options.num_draft_tokens[0]
        console.print(f"compiling {spec}, acceptance {rule}")
        with compilespec.compile(
            str(directory), spec, backend=options.backend, max_batch_size=max(options.batch),
            max_seq_len=512, **keywords,
        ) as engine:  # fmt: skip
            vocab_size = engine.geometry.vocab_size
            prompts = encode_prompts(load_prompts(options.num_prompts), directory, vocab_size)
            for batch in options.batch:
                steps = time_kinds(engine, list(prompts.values()), batch, options.rounds)
                ratios = {k: v["p50"] / steps[GREEDY]["p50"] for k, v in steps.items()}
                result["runs"].append(
                    {"spec": spec, **keywords, "acceptance": rule, "batch": batch,
                     "step_ms": steps, "ratio": ratios}
                )  # fmt: skip
                failed |= rule == "auto" and any(ratios[kind] > LIMIT for kind in GATED)
            failed |= bool(engine.stats().num_recompiles)
    result["limit"] = dict.fromkeys(GATED, LIMIT)
    print_steps(console, result["runs"])
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(failed)


def time_kinds(
    engine: Any, prompts: list[list[int]], batch: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Quantiles of the milliseconds of a decode step, by kind of request."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    groups = make_batches([str(index) for index in range(len(prompts))], batch)
    names = list(KINDS)
    for turn in range(rounds * len(groups)):
        shift = turn % len(names)
        group = [prompts[int(index)] for index in groups[turn % len(groups)]]
        for kind in names[shift:] + names[:shift]:
            times[kind] += time_steps(engine, group, KINDS[kind], seed=turn)
    return {kind: quantiles(values) for kind, values in times.items()}


def time_steps(
    engine: Any, prompts: list[list[int]], fields: dict[str, Any], *, seed: int
) -> list[float]:
    """Milliseconds of each of NUM_STEPS decode steps of the prompts together."""
    import compilespec

    params = compilespec.SamplingParams(max_new_tokens=300, ignore_eos=True, seed=seed, **fields)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while any(len(request.output_token_ids) < 2 for request in requests):
        engine.step()
    for _ in range(NUM_WARM):
        engine.step()
    times = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    return times


def print_steps(console: Console, runs: list[dict[str, Any]]) -> None:
    table = Table(title=f"decode step, ms (p50), and its ratio to greedy (limit {LIMIT})")
    for column in ("spec", "acceptance", "batch", *KINDS):
        table.add_column(column, justify="left" if column in ("spec", "acceptance") else "right")
    for entry in runs:
        cells = [f"{entry['step_ms'][k]['p50']:.2f} ({entry['ratio'][k]:.2f}x)" for k in KINDS]
        table.add_row(entry["spec"], entry["acceptance"], str(entry["batch"]), *cells)
    console.print(table)
