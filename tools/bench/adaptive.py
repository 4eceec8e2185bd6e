"""K chosen for every step against every fixed K, on texts that repeat and texts that do not.

    python -m tools.bench.adaptive           written to results/adaptive.json
    python -m tools.bench.adaptive --real    SmolLM2-135M-Instruct: results/adaptive-real.json

An engine a method has steps of several K; it decodes the same prompts with each K for all steps and
with the K that it chooses, by turns, one round after the other.  Tokens are checked to be the same
whatever K was.  `share_of_best` is its speed beside that of the K that is best over all rounds,
`share_of_plain` beside K = 0, both medians of the rounds: ways of one round are neighbours in time,
so that a machine whose speed changes blurs these less than the speeds.  On one that others use as
well, `modelled` is the better figure: steps by K and batch, each at the fastest time that was
measured for one at the start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

import compilespec
from compilespec import SamplingParams
from compilespec.runtime.adaptive import AdaptiveDrafts, StepPlan
from compilespec.runtime.step_costs import StepCosts, measure
from tools.bench import real, report
from tools.bench.prompts import load_prompts
from tools.real_models import SMOLLM2

LIMIT = 0.95  # share of the speed of the best fixed K
LEAST = 0.97  # of that of plain steps
METHODS = ("ngram", "suffix", "eagle3")
AUTO = "auto"
NUM_REMEMBERED = 16  # ended requests, by `suffix`
REPEATED = "def area_{0}(width, height):\n    return width * height + {0}\n\n"


class Fixed:
    """In the place of `AdaptiveDrafts`: one K for all steps."""

    def __init__(self, count: int, adaptive: AdaptiveDrafts) -> None:
        self.policy, self._adaptive = adaptive.policy, adaptive
        self._count = count

    def begin(self, requests: Sequence[Any], *, is_late: bool = False) -> StepPlan:
        if not self._count:
            self._adaptive._note_plain(requests)
        return StepPlan(num_draft_tokens=self._count)

    def end(self, *_: Any) -> None: ...

    def note(self, requests: Sequence[Any], evidence: Sequence[Any]) -> None:
        self._adaptive.note(requests, evidence)


class Counted:
    """Around either: notes the steps, by K and number of requests."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.steps = inner, Counter[tuple[int, int]]()

    def begin(self, requests: Sequence[Any], *, is_late: bool = False) -> StepPlan:
        plan: StepPlan = self.inner.begin(requests, is_late=is_late)
        self.steps[plan.num_draft_tokens, len(requests)] += 1
        return plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def texts(num: int, ordinary: list[Any]) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """By case, the prompts, and how they are answered; `ordinary` are texts or token ids."""
    ordinary = ordinary[:num]
    copied = ["".join(REPEATED.format(i) for i in range(k, k + 4)) for k in range(num)]
    always = [f"{word} = [{', '.join(['0'] * 24)}, " for word in "abcdefghijklmnop"[:num]]
    return {
        "ordinary": (ordinary, {}),
        "copied": (copied, {}),
        "never": (ordinary, {"temperature": 3.0, "seed": 1}),
        "always": (always, {}),
    }


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if the K that is chosen misses a limit, else 0."""
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {
        "benchmark": "adaptive K", **report.environment(), "limit": LIMIT, "least": LEAST,
        "max_new_tokens": options.max_new_tokens, "rounds": options.rounds, "cases": [],
    }  # fmt: skip
    model, heads, ordinary = (_real if options.real else _demo)(max(options.batch))
    for method in [m for m in METHODS if not options.only or options.only in m]:
        console.print(f"compiling {method}")
        with compilespec.compile(
            model, method, num_draft_tokens=AUTO, max_batch_size=max(options.batch),
            backend=options.backend, **heads.get(method, {}),
        ) as engine:  # fmt: skip
            costs = measure(engine._executor, num_times=8)
            for batch in options.batch:
                for case, (prompts, fields) in texts(batch, ordinary).items():
                    params = SamplingParams(
                        max_new_tokens=options.max_new_tokens, ignore_eos=True, **fields
                    )
                    row = compare(engine, costs, prompts, params, options.rounds)
                    result["cases"].append({"method": method, "case": case, "batch": batch, **row})
                    report.write_json(options.name, result)  # what there is, if it is ended
    show(console, result["cases"])
    return int(any(missed(case) for case in result["cases"]))


def _demo(num: int) -> tuple[str, dict[str, dict[str, Any]], list[Any]]:
    return "demo", {}, list(load_prompts(num).values())


def _real(num: int) -> tuple[str, dict[str, dict[str, Any]], list[Any]]:
    """The model, what a method needs beside it, and prompts through its chat template."""
    prompts = list(real.read_prompts(SMOLLM2, num).values())
    return str(SMOLLM2), {"eagle3": {"draft": str(real.HEAD)}}, prompts


def missed(case: dict[str, Any]) -> bool:
    modelled = case["modelled_tokens_per_s"]
    chosen = modelled[AUTO]
    fixed = [speed for way, speed in modelled.items() if way != AUTO]
    return bool(chosen < LIMIT * max(fixed) or chosen < LEAST * modelled.get("K=0", 0.0))


def compare(
    engine: Any, costs: StepCosts, prompts: list[str], params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """Tokens a second of decode steps by way, measured and modelled: medians of the rounds.

    Raises: SystemExit if a way gives other tokens.
    """
    launches = engine._scheduler.launches
    adaptive, counts = launches.adaptive, engine.geometry.config.draft_counts
    ways: dict[str, Any] = {AUTO: adaptive, **{f"K={k}": Fixed(k, adaptive) for k in counts}}
    measured: dict[str, list[float]] = {name: [] for name in ways}
    modelled: dict[str, list[float]] = {name: [] for name in ways}
    step_ms: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[int, int] = {}
    tokens: dict[str, Any] = {}
    for number in range(rounds + 1):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            launches.adaptive = counted = Counted(ways[name])
            forgotten = [f"{number}{name}{i}" for i in range(NUM_REMEMBERED)]
            engine.generate(forgotten, SamplingParams(max_new_tokens=2))
            counted.steps.clear()
            before, started = engine.stats(), time.perf_counter()
            outputs = engine.generate(prompts, params)
            elapsed = (time.perf_counter() - started) * 1e3
            after = engine.stats()
            tokens[name] = [output.token_ids for output in outputs]
            given = sum(len(one) - 1 for one in tokens[name])
            if name == AUTO:
                by_k = counted.steps.items()
                steps = {k: sum(num for (one, _), num in by_k if one == k) for k in counts}
            ms = sum(costs.step(k, batch) * num for (k, batch), num in counted.steps.items())
            if number:  # the first round warms up, and lets the policy learn
                elapsed -= after.prefill_ms - before.prefill_ms
                measured[name].append(given / elapsed)
                step_ms[name].append(elapsed / counted.steps.total())
                modelled[name].append(given / ms)
    launches.adaptive = adaptive
    best = max(list(ways)[1:], key=lambda name: statistics.median(measured[name]))
    wrong = [name for name in ways if tokens[name] != tokens["K=0" if 0 in counts else AUTO]]
    return {
        "tokens_per_s": {
            name: 1e3 * statistics.median(values) for name, values in measured.items()
        },
        "modelled_tokens_per_s": {
            name: 1e3 * statistics.median(values) for name, values in modelled.items()
        },
        "step_ms": {name: statistics.median(values) for name, values in step_ms.items()},
        "share_of_best": _share(measured[AUTO], measured[best]),
        "share_of_plain": _share(measured[AUTO], measured.get("K=0")),
        "steps_by_k": steps,
        "other_tokens": wrong,
        "policy": engine.plan()["adaptive"],
    }


def _share(chosen: list[float], fixed: list[float] | None) -> float | None:
    if fixed is None:
        return None
    return statistics.median(mine / theirs for mine, theirs in zip(chosen, fixed, strict=True))


def show(console: Console, cases: list[dict[str, Any]]) -> None:
    rows = []
    for case in cases:
        speeds, modelled = case["tokens_per_s"], case["modelled_tokens_per_s"]
        best = max((way for way in modelled if way != AUTO), key=lambda way: modelled[way])
        cells = [f"{speeds.get(w, 0):.0f} ({modelled.get(w, 0):.0f})" for w in (AUTO, best, "K=0")]
        by_k = ", ".join(f"{k}: {num}" for k, num in case["steps_by_k"].items())
        cells[1] = f"{best}: {cells[1]}"
        cells.append(f"{case['share_of_best']:.2f}")
        rows.append((case["method"], case["case"], case["batch"], *cells, by_k))
    columns = ("method", "text", "batch", "chosen", "best fixed", "K = 0", "share", "steps by K")
    report.print_table(console, "decode tokens/s: measured (modelled)", columns, rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.adaptive")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, help="of each way (40; --real: 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="only methods whose name contains this")
    parser.add_argument("--real", action="store_true", help="the model of `make smollm2`")
    parser.add_argument("--name", help="results/NAME.json (default: adaptive or adaptive-real)")
    options = parser.parse_args(arguments)
    options.name = options.name or ("adaptive-real" if options.real else "adaptive")
    options.rounds = options.rounds or (5 if options.real else 40)
    return run(options, Console(width=None if sys.stdout.isatty() else 140))


if __name__ == "__main__":
    sys.exit(main())
