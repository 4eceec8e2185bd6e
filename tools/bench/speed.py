"""The main benchmark: check every way's output, time all ways by turns, then judge the gates."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from tools.bench import gates, report
from tools.bench.check import Checker, Comparison
from tools.bench.measure import Samples, interleave
from tools.bench.prompts import encode_prompts, load_prompts
from tools.bench.way import Setup, Way
from tools.bench.ways import build_ways


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if an output is wrong, a program recompiled or a gate is missed."""
    torch.set_num_threads(options.threads)
    model_dir = find_model(options.model)
    model = load_model(model_dir, options.dtype)
    prompts = encode_prompts(
        load_prompts(options.num_prompts), model_dir, model.config.get_text_config().vocab_size
    )
    batches = {size: make_batches(list(prompts), size) for size in options.batch}
    setup = Setup(
        model_dir=model_dir,
        model=model,
        max_new_tokens=options.max_new_tokens,
        max_batch_size=max(options.batch),
        num_threads=options.threads,
        draft=options.draft,
        backend=options.backend,
        max_seq_len=options.max_seq_len,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
    )
    console.print("building every way (compiling may take minutes)")
    ways, skipped = build_ways(setup, tuple(options.num_draft_tokens), options.only)
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}")
    result: dict[str, Any] = {
        "benchmark": "speed",
        **report.environment(),
        "settings": {
            "model": options.model,
            "dtype": str(model.dtype),
            "backend": options.backend,
            "max_new_tokens": options.max_new_tokens,
            "rounds": options.rounds,
            "prompt_tokens": {name: len(ids) for name, ids in prompts.items()},
            "skipped": skipped,
        },
    }
    try:
        comparisons = check_outputs(ways, prompts, batches, Checker(model), console)
        report.print_check(console, comparisons)
        result["outputs"] = [c.to_dict() for c in comparisons if c.first_difference is not None]
        result["num_outputs_checked"] = len(comparisons)
        wrong = [c for c in comparisons if not c.ok]
        if wrong:
            names = ", ".join(sorted({c.way for c in wrong}))
            console.print(f"[red]wrong tokens from {names}; no speed is printed[/]")
            return 1
        verdicts = time_ways(ways, prompts, batches, options, result, console)
    finally:
        for way in ways:
            way.close()
    report.print_verdicts(console, verdicts)
    result["gates"] = [
        {**asdict(v.gate), "batch": v.batch, "ran": [v.way, v.against], "measured": v.ratio}
        | {"passed": v.passed}
        for v in verdicts
    ]
    console.print(f"written to {report.write_json(options.name, result)}")
    return 1 if any(v.failed for v in verdicts) or result["problems"] else 0


def check_outputs(
    ways: list[Way],
    prompts: dict[str, list[int]],
    batches: dict[int, list[list[str]]],
    checker: Checker,
    console: Console,
) -> list[Comparison]:
    """Run every way on every batch once (a warm-up); the first way at batch 1 is the baseline."""
    reference = {name: ways[0].generate([ids])[0] for name, ids in prompts.items()}
    comparisons = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("checking outputs", total=len(ways) * len(batches))
        for way in ways:
            for size, groups in batches.items():
                progress.advance(task)
                if size > way.max_batch_size:
                    continue
                # Longest first: a static cache is made once, long enough for all.
                for group in sorted(groups, key=lambda g: -max(len(prompts[name]) for name in g)):
                    texts = way.generate([prompts[name] for name in group])
                    comparisons += [
                        checker.compare(
                            way.name, size, name, prompts[name], tokens, reference[name]
                        )
                        for name, tokens in zip(group, texts, strict=True)
                    ]
    return comparisons


def time_ways(
    ways: list[Way],
    prompts: dict[str, list[int]],
    batches: dict[int, list[list[str]]],
    options: argparse.Namespace,
    result: dict[str, Any],
    console: Console,
) -> list[gates.Verdict]:
    """Fill result["speeds"] and result["problems"], print the tables, and judge the gates."""
    verdicts = []
    result["speeds"], result["problems"] = {}, []
    for size, groups in batches.items():
        inputs = [[prompts[name] for name in group] for group in groups]
        running = [way for way in ways if size <= way.max_batch_size]
        calls = {way.name: partial(generate, way, inputs) for way in running}
        # A batch of several prompts has fewer groups: more rounds give each size as many samples.
        rounds = max(options.rounds, -(-options.rounds * options.num_prompts // (4 * len(inputs))))
        samples = with_progress(console, f"batch {size}", calls, len(inputs), rounds)
        summaries: dict[str, Any] = {
            way.name: {**samples[way.name].summary(), **way.stats()} for way in running
        }
        result["speeds"][str(size)] = summaries
        report.print_speeds(console, size, summaries, ways[0].name)
        medians = {name: summary["tokens_per_s"]["p50"] for name, summary in summaries.items()}
        verdicts += gates.judge(medians, size)
        if not options.only:
            for gate in gates.missing(medians):
                result["problems"].append(f"batch {size}: {gate.way} was not judged")
        for name, summary in summaries.items():
            if summary.get("num_recompiles"):
                result["problems"].append(f"{name} recompiled {summary['num_recompiles']} times")
    for problem in result["problems"]:
        console.print(f"[red]{problem}[/]")
    return verdicts


def generate(
    way: Way, inputs: list[list[list[int]]], index: int, max_new_tokens: int | None = None
) -> int:
    """Run one batch; returns the number of new tokens."""
    return sum(map(len, way.generate(inputs[index], max_new_tokens)))


def with_progress(
    console: Console,
    title: str,
    calls: Mapping[str, Callable[[int], int]],
    num_inputs: int,
    rounds: int,
) -> dict[str, Samples]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=rounds * num_inputs * len(calls))
        return interleave(calls, num_inputs, rounds, on_call=lambda _: progress.advance(task))


def make_batches(names: list[str], size: int) -> list[list[str]]:
    """Groups of exactly `size` names, repeating from the start to fill the last one."""
    num_groups = -(-len(names) // size)
    endless = names * (num_groups * size // len(names) + 1)
    return [endless[i * size : (i + 1) * size] for i in range(num_groups)]


def find_model(model: str) -> Path:
    """The checkpoint directory that `compile(model)` reads."""
    if model != "demo":
        return Path(model)
    from compilespec.demo import demo_directory

    folder = demo_directory()
    if (folder / "config.json").exists():
        return folder
    raise FileNotFoundError(f"no demo checkpoint at {folder}: expected a config.json there")


def load_model(model_dir: Path, dtype: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype) if dtype else "auto", local_files_only=True
    )
    return model.eval().requires_grad_(False)
