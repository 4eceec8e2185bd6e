"""Minutes of load: clients come and go, more of them than state rows, over a shared cache.

It checks what must hold for a server: nothing is compiled while it serves, its memory does not
grow, and requests are served faster together than one after the other.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import compilespec
from compilespec import SamplingParams
from compilespec.runtime.engine import Engine
from compilespec.runtime.request import Request
from tools.bench import measure, report
from tools.bench.prompts import load_prompts

MAX_GROWTH = 0.02  # of resident memory, after the first fifth of the time
MIN_SPEEDUP = 2.5  # of 8 requests at once over one by one
NUM_CLIENTS = 12  # requests in the engine at any time; 8 of them have a row
ABORTED = 0.03  # of all requests
REPEATS = 3  # of every prompt when throughput is measured


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if a check fails, else 0."""
    torch.set_num_threads(options.threads)
    prompts = list(load_prompts(options.num_prompts).values())
    speedup: dict[str, Any] = {}
    console.print("compiling the demo")
    for spec in ("none", "eagle3"):
        with compilespec.compile(
            "demo", spec, max_batch_size=8, backend=options.backend, enable_prefix_caching=False
        ) as engine:
            speedup[spec] = _speedup(engine, prompts, options)
    with compilespec.compile("demo", "eagle3", max_batch_size=8, backend=options.backend) as engine:
        console.print(f"{options.minutes:g} minutes of load")
        served = serve(engine, prompts, options.minutes * 60)
        plan = engine.plan()
    holds = {
        "no_recompilations": served["num_recompiles"] == 0,
        "flat_memory": served["resident_growth"] < MAX_GROWTH,
        **{f"faster_together.{spec}": s["ratio"] >= MIN_SPEEDUP for spec, s in speedup.items()},
    }
    result = {
        "benchmark": "load", **report.environment(), "plan": plan, "speedup": speedup,
        "served": served, "holds": holds,
    }  # fmt: skip
    _print(console, result)
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(not all(holds.values()))


def serve(engine: Engine, prompts: Sequence[str], seconds: float, seed: int = 0) -> dict[str, Any]:
    """Keep `NUM_CLIENTS` requests in the engine for that time; half of them are greedy."""
    draw = random.Random(seed)
    before, start = engine.stats(), time.perf_counter()
    clients: list[Request] = []
    resident: list[tuple[float, int]] = []
    texts: dict[tuple[int, ...], set[tuple[int, ...]]] = {}  # greedy ones, by prompt
    first_token_ms: list[float] = []
    num_tokens = num_done = 0
    while (elapsed := time.perf_counter() - start) < seconds:
        while len(clients) < NUM_CLIENTS:
            clients.append(engine.submit(*_ask(draw, engine, prompts)))
        if draw.random() < ABORTED / 20:  # a request takes some 20 steps
            engine.abort(draw.choice(clients))
        engine.step()
        for request in [client for client in clients if client.finished]:
            clients.remove(request)
            num_done += 1
            num_tokens += len(request.output_token_ids)
            if request.timings.time_to_first_token_ms is not None:
                first_token_ms.append(request.timings.time_to_first_token_ms)
            if request.params.temperature == 0 and request.finish_reason == "length":
                said = tuple(request.output_token_ids[:16])
                texts.setdefault(request.prompt_token_ids, set()).add(said)
        if not resident or elapsed - resident[-1][0] >= min(1.0, seconds / 60):
            resident.append((elapsed, resident_bytes()))
    elapsed = time.perf_counter() - start
    for request in clients:
        engine.abort(request)
    stats = engine.stats()
    early = [size for at, size in resident if 0.15 <= at / seconds <= 0.25]
    late = [size for at, size in resident if at / seconds >= 0.9]
    return {
        "seconds": elapsed,
        "num_requests": num_done,
        "tokens_per_s": num_tokens / elapsed,
        "time_to_first_token_ms": measure.quantiles(first_token_ms),
        "num_recompiles": stats.num_recompiles,
        "num_preemptions": stats.num_preemptions - before.num_preemptions,
        "num_cached_tokens": stats.num_cached_tokens - before.num_cached_tokens,
        "acceptance_length": stats.acceptance_length,
        "resident_mib": [round(size / 2**20, 1) for _, size in resident],
        "resident_growth": statistics.median(late) / statistics.median(early) - 1,
        "num_prompts_with_one_greedy_text": sum(len(said) == 1 for said in texts.values()),
        "num_greedy_prompts": len(texts),
    }


def resident_bytes() -> int:
    """Resident memory of this process, as the kernel counts it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _ask(
    draw: random.Random, engine: Engine, prompts: Sequence[str]
) -> tuple[list[int], SamplingParams]:
    """A prompt, cut anywhere, and its sampling parameters."""
    ids = engine.encode(draw.choice(prompts))
    ids = ids[: max(1, draw.randrange(len(ids) // 8, len(ids) + 1) // 8 * 8)]
    temperature = draw.choice((0.0, 0.0, 0.7, 1.0))
    return ids, SamplingParams(
        max_new_tokens=draw.choice((16, 32, 64, 128)), temperature=temperature, ignore_eos=True
    )


def _speedup(engine: Engine, prompts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The same requests one by one and 8 at a time, by turns.

    There are several requests for each row, so that a row whose request ends serves the next one.
    With only 8 requests, speculation would finish some long before the others, and the batch would
    seldom be 8.
    """
    params = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)
    ids = [engine.encode(prompt) for prompt in prompts] * REPEATS
    times: dict[str, list[float]] = {"one by one": [], "at once": []}
    texts: dict[str, list[list[int]]] = {}
    for number in range(options.rounds + 1):
        for name, parts in (("one by one", [[one] for one in ids]), ("at once", [ids])):
            start = time.perf_counter()
            results = [result for part in parts for result in engine.generate(part, params)]
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
            texts[name] = [list(result.token_ids) for result in results]
    if texts["one by one"] != texts["at once"]:
        raise SystemExit(
            "requests served together gave other tokens than one by one; nothing was timed"
        )
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    return {
        "num_requests": len(ids),
        "seconds": times,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def _print(console: Console, result: dict[str, Any]) -> None:
    served = result["served"]
    rows = (
        ("recompilations", str(served["num_recompiles"]), "0"),
        ("growth of resident memory", f"{served['resident_growth']:+.2%}", f"< {MAX_GROWTH:.0%}"),
        *(
            (f"8 at once / one by one, {spec}", f"{speedup['ratio']:.2f}", f">= {MIN_SPEEDUP}")
            for spec, speedup in result["speedup"].items()
        ),
        ("requests", str(served["num_requests"]), ""),
        ("tokens per second", f"{served['tokens_per_s']:.0f}", ""),
        ("prompt tokens found in the cache", str(served["num_cached_tokens"]), ""),
    )
    report.print_table(console, "load", ("what", "measured", "must hold"), rows)
