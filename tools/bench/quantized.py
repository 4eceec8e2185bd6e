"""Cost and gain of quantization: step times of a random model, acceptance of the demo pair.

    python -m tools.bench.quantized            both, written to results/quantized.json

Decode steps (batch 1, plain and with K n-gram drafts) of a 12-layer, width-768 Llama of random
bfloat16 weights, unquantized and in every config that the CPU runs, by turns.  Then the demo's
acceptance length with target and draft quantized, each and both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import compilespec
from compilespec import SamplingParams
from tools.bench import report
from tools.bench.measure import quantiles
from tools.bench.prompts import load_prompts

CONFIGS = ("int8_weight_only", "int8_dynamic", "int4_weight_only", "float8_weight_only")
DEFAULT = "int8_weight_only"
BF16 = "bf16"
NUM_WARM = 3  # warm-up turns


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if the default config is slower than bf16."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.quantized")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=64, help="prompt tokens before the steps")
    parser.add_argument("--num-draft-tokens", type=int, default=5, metavar="K")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of one step in every way")
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=6, help="prompts of the demo")
    parser.add_argument("--only", choices=["steps", "acceptance"], help="one of the two tables")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--name", default="quantized", help="results/NAME.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 120)
    result: dict[str, Any] = {
        "benchmark": "quantized", **report.environment(), "options": vars(options),
    }  # fmt: skip
    result["versions"]["torchao"] = version("torchao")
    slower = False
    if options.only != "acceptance":
        result["steps"] = measure_steps(options, console)
        slower = print_steps(console, result["steps"])
    if options.only != "steps":
        result["acceptance"] = measure_acceptance(options, console)
        print_acceptance(console, result["acceptance"])
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(slower)


# --- step times ---


def measure_steps(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """A row for each config: bytes that a step reads, milliseconds, ratio to bf16."""
    model = random_model(options.layers, options.width)
    steps, rows = {}, []
    for config in (None, *options.configs):
        for count in (0, options.num_draft_tokens):
            name = config or BF16
            console.print(f"compiling {name}, K={count}")
            spec: dict[str, Any] = {"spec": "ngram", "num_draft_tokens": count} if count else {}
            engine = compilespec.compile(
                model, quantize=config, backend=options.backend, max_batch_size=1,
                max_seq_len=4 * options.context, **spec,
            )  # fmt: skip
            steps[name, count] = one_step(engine, options.context)
            rows.append(
                {"config": name, "num_draft_tokens": count, "weight_bytes": weight_bytes(engine)}
            )
    times: dict[Any, list[float]] = {way: [] for way in steps}
    busy: dict[Any, list[float]] = {way: [] for way in steps}
    ways = list(steps)
    for turn in range(options.rounds + NUM_WARM):
        shift = turn % len(ways)
        for way in ways[shift:] + ways[:shift]:
            elapsed_ms, busy_ms = steps[way]()
            if turn >= NUM_WARM:
                times[way].append(elapsed_ms)
                busy[way].append(busy_ms)
    for row in rows:
        count = row["num_draft_tokens"]
        own, base = times[row["config"], count], times[BF16, count]
        row["step_ms"] = quantiles(own)
        row["ratio_to_bf16"] = statistics.median(base) / statistics.median(own)
        # by turns, so that a slow spell of the machine affects both
        row["paired_ratio"] = quantiles([b / o for b, o in zip(base, own, strict=True)])
        # on a machine that others use, one thread: what waiting for a core does not change
        own, base = busy[row["config"], count], busy[BF16, count]
        row["busy_ms"] = quantiles(own)
        row["busy_ratio"] = statistics.median(base) / statistics.median(own)
    return rows


def random_model(num_layers: int, width: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=num_layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, max_position_embeddings=1024,
    )  # fmt: skip
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def one_step(engine: Any, context: int) -> Callable[[], tuple[float, float]]:
    """A function that runs a decode step and returns its milliseconds of wall time and of processor
    time; finished requests are replaced.
    """
    prompt = [1 + 7 * i % 1000 for i in range(context)]
    params = SamplingParams(max_new_tokens=2 * context, ignore_eos=True)

    def step() -> tuple[float, float]:
        if not engine.has_work:
            engine.submit(prompt, params)
            engine.step()  # the prompt
        start, busy = time.perf_counter(), time.process_time()
        engine.step()
        return (time.perf_counter() - start) * 1e3, (time.process_time() - busy) * 1e3

    return step


def weight_bytes(engine: Any) -> int:
    """Bytes of the weights and scales that the products of a decode step read."""
    read = {
        part
        for node in engine.graphs["decode"].graph_module.graph.nodes
        if "linear" in str(node.target)
        for part in node.args[1:3]
        if getattr(part, "op", "") == "placeholder"
    }
    return sum(part.meta["val"].numel() * part.meta["val"].element_size() for part in read)


def print_steps(console: Console, rows: list[dict[str, Any]]) -> bool:
    table = Table(title="decode step, batch 1")
    for column in ("config", "K", "MB of weights read", "ms p20", "ms p50", "x bf16", "paired",
                   "busy ms p50", "x bf16 busy"):  # fmt: skip
        table.add_column(column, justify="left" if column == "config" else "right")
    slower = False
    for row in rows:
        ratio = row["paired_ratio"]["p50"]
        slower |= row["config"] == DEFAULT and ratio < 1
        table.add_row(
            row["config"], str(row["num_draft_tokens"]), f"{row['weight_bytes'] / 1e6:.0f}",
            f"{row['step_ms']['p20']:.2f}", f"{row['step_ms']['p50']:.2f}",
            f"{row['ratio_to_bf16']:.2f}", f"{ratio:.2f}",
            f"{row['busy_ms']['p50']:.2f}", f"{row['busy_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    return slower


# --- acceptance ---


def measure_acceptance(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """The demo's acceptance length; the target, the draft, or both quantized."""
    prompts = list(load_prompts(options.num_prompts).values())
    rows = []
    cases: list[tuple[str | None, str | None]] = [(None, None)]
    for name in options.configs:
        cases += [(name, None), (None, name), (name, name)]
    for target, draft in cases:
        console.print(f"demo: target {target or '-'}, draft {draft or '-'}")
        with compilespec.compile(
            "demo", "eagle3", backend=options.backend, max_batch_size=1, num_draft_tokens=3,
            quantize=target, draft_quantize=draft,
        ) as engine:  # fmt: skip
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=64, ignore_eos=True))
        emitted = [count for output in outputs for count in output.emitted_per_step]
        rows.append(
            {"target": target, "draft": draft, "acceptance_length": statistics.fmean(emitted)}
        )
    return rows


def print_acceptance(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="demo, eagle3 K=3: acceptance length")
    for column in ("target", "draft", "acceptance length"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["target"] or "-", row["draft"] or "-", f"{row['acceptance_length']:.3f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
