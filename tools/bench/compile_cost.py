"""Compile seconds by depth: one shape at several numbers of layers, whole steps and pieces.

Every configuration is a separate process with empty caches; a second one, with what the first
left there, is the warm start.  Compilers run one at a time, and seconds of processor time, theirs
included, stand beside seconds of the clock: on a machine that others use, too, only the former say
what compiling costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench import report
from tools.bench.first_token import MARK, spawn

LAYERS = (8, 32, 16)  # the two that are judged first
UNITS = ("pieces", "whole")
GROWTH_LIMIT = 1.5  # of the deepest to the shallowest, compiled in pieces
JUDGED = "total_cpu_s"  # compiling, and what comes before it
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 when pieces grow with depth by more than the limit, else 0."""
    result: dict[str, Any] = {
        "benchmark": "compile cost", **report.environment(), "shape": SHAPE, "spec": "none",
        "limit": GROWTH_LIMIT, "runs": [],
    }  # fmt: skip
    for units in UNITS:
        if options.only and options.only not in units:
            continue
        for layers in LAYERS:
            job = {"num_layers": layers, "units": units, "threads": options.threads}
            with tempfile.TemporaryDirectory(prefix="compilespec-compile-cost-") as folder:
                for start in ("cold", "warm"):
                    console.print(f"{units}, {layers} layers, {start}")
                    answer = spawn("tools.bench.compile_cost", job, Path(folder))
                    result["runs"].append({**job, "start": start, **answer})
                    result["growth"] = growth(result["runs"])
                    path = report.write_json(options.name, result)  # what there is, if it is ended
    print_runs(console, sorted(result["runs"], key=lambda r: (r["units"], r["num_layers"])))
    console.print(f"written to {path}")
    ratios = result["growth"].get("pieces", {})
    words = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    console.print(f"pieces, {max(LAYERS)} layers against {min(LAYERS)}, cold: {words}")
    return int(ratios.get(JUDGED, 0.0) > GROWTH_LIMIT)


def growth(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Cold seconds of the deepest over those of the shallowest, by units: lowering, and all."""
    cold = {(r["units"], r["num_layers"]): r for r in runs if r["start"] == "cold"}
    return {
        units: {
            key: cold[units, max(LAYERS)][key] / cold[units, min(LAYERS)][key]
            for key in ("lower_s", "total_s", "lower_cpu_s", "total_cpu_s")
        }
        for units in UNITS
        if {(units, min(LAYERS)), (units, max(LAYERS))} <= set(cold)
    }


def print_runs(console: Console, runs: list[dict[str, Any]]) -> None:
    table = Table(title=f"compile seconds, width {SHAPE['hidden_size']}, plain decoding")
    columns = ("trace", "rewrite", "lower", "total", "lower, CPU", "total, CPU", "compiled")
    for column in ("units", "layers", "start", *columns):
        table.add_column(column, justify="left" if column in ("units", "start") else "right")
    for entry in runs:
        keys = ("trace_s", "rewrite_s", "lower_s", "total_s", "lower_cpu_s", "total_cpu_s")
        seconds = [f"{entry[key]:.1f}" for key in keys]
        table.add_row(
            entry["units"], str(entry["num_layers"]), entry["start"], *seconds,
            str(entry["num_compiled"]),
        )  # fmt: skip
    console.print(table)


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One configuration in its own process."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, where they are counted
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import compilespec
    from compilespec import _torch_compat
    from compilespec.lowering import lower
    from compilespec.ops._build import cache_directory
    from compilespec.program import PHASES
    from compilespec.runtime.executor import PrefillChunk
    from compilespec.runtime.step_runner import StepRunner

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", num_hidden_layers=job["num_layers"], **SHAPE)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    begun, begun_cpu = time.perf_counter(), cpu_seconds()
    program = compilespec.trace(model, "none", max_batch_size=4, max_seq_len=256, keep_graphs=False)
    traced = time.perf_counter()
    units: Any = dict.fromkeys(PHASES, job["units"])
    if not (cache_directory() / "artifacts").exists():  # a warm start never looks at ATen graphs
        for graph in program.graphs.values():
            _ = graph.graph_module  # the retrace and the passes on ATen, which `lower` asks for
    rewritten, rewritten_cpu = time.perf_counter(), cpu_seconds()
    lowered = lower(program, units=units)
    done, done_cpu = time.perf_counter(), cpu_seconds()
    runner = StepRunner(lowered)  # run both phases: what compiles late counts as recompiled
    runner.set_blocks(0, range(program.config.blocks_per_row))
    runner.prefill([PrefillChunk(row=0, start=0, tokens=tuple(range(5, 25)), next_token=None)])
    tokens = [runner.decode([0])[0][0] for _ in range(4)]
    return {
        "trace_s": traced - begun,
        "rewrite_s": rewritten - traced,
        "lower_s": done - rewritten,
        "total_s": done - begun,
        "lower_cpu_s": done_cpu - rewritten_cpu,
        "total_cpu_s": done_cpu - begun_cpu,
        "by_phase_s": {name: cost["seconds"] for name, cost in lowered.costs().items()},
        "from_cache": all(phase.from_cache for phase in lowered.graphs.values()),
        "num_compiled": _torch_compat.count_compilations(),
        "num_recompiles": runner.num_recompiles,
        "tokens": tokens,
    }


def cpu_seconds() -> float:
    """Processor time of this process and of those it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    print(MARK + json.dumps(child(json.loads(sys.argv[sys.argv.index("--child") + 1]))), flush=True)
