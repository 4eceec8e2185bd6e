"""Step times of random models, which need no trained checkpoint.

A random head's drafts are almost never accepted, so every step verifies K drafts and emits one
token, and the context stays about where it was set.  Each configuration runs in its own process
with empty caches, which gives the cold compile time too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench import report
from tools.bench.first_token import MARK, spawn
from tools.bench.measure import quantiles

BATCHES = (1, 3, 8)
CONTEXTS = (16, 2048)
NUM_STEPS = {16: 60, 2048: 30}
MODELS = {
    # The demo target's shape.
    "llama": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "intermediate_size": 448,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 448,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
    },
}


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if a configuration failed or recompiled, else 0."""
    result: dict[str, Any] = {"benchmark": "milestone", **report.environment(), "runs": []}
    failed = False
    for job in jobs(options):
        console.print("running {model} {spec} {backend} {dtype}".format(**job))
        with tempfile.TemporaryDirectory(prefix="compilespec-milestone-") as folder:
            try:
                answer = spawn("tools.bench.milestone", job, Path(folder))
            except RuntimeError as error:
                failed = True
                console.print(f"[red]{str(error).strip().splitlines()[-1]}[/]", highlight=False)
                answer = {"error": str(error)}
        failed |= bool(answer.get("num_recompiles"))
        result["runs"].append({**job, **answer})
    print_runs(console, result["runs"])
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(failed)


def jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in MODELS:
        for backend in ("inductor", "eager"):
            for spec in ("none", "eagle3"):
                if options.only and options.only not in f"{model} {spec} {backend}":
                    continue
                yield {
                    "model": model,
                    "spec": spec,
                    "backend": backend,
                    "num_draft_tokens": options.num_draft_tokens[0],
                    "dtype": options.dtype or "float32",
                    "threads": options.threads,
                    "batches": BATCHES,
                    "contexts": CONTEXTS,
                }


def print_runs(console: Console, runs: list[dict[str, Any]]) -> None:
    table = Table(title="decode step, ms (p50), and cold compile")
    table.add_column("model")
    table.add_column("spec")
    table.add_column("backend")
    for context in CONTEXTS:
        for batch in BATCHES:
            table.add_column(f"B={batch} context {context}", justify="right")
    table.add_column("cold s", justify="right")
    table.add_column("recompiles", justify="right")
    for entry in runs:
        cells = ["error"] * (len(CONTEXTS) * len(BATCHES) + 2)
        if "error" not in entry:
            steps = {(s["batch"], s["context"]): s["step_ms"]["p50"] for s in entry["steps"]}
            cells = [f"{steps[batch, context]:.2f}" for context in CONTEXTS for batch in BATCHES]
            cells += [f"{entry['cold_s']:.1f}", str(entry["num_recompiles"])]
        table.add_row(entry["model"], entry["spec"], entry["backend"], *cells)
    console.print(table)


def make_model(family: str, dtype: str) -> Any:
    """A random transformers model of one of MODELS, seeded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **MODELS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)


def make_head(model: Any) -> Any:
    """A random EAGLE-3 head that shares the model's embedding and output head."""
    from compilespec.methods.eagle3 import random_head
    from compilespec.tracing.target_info import TargetInfo

    target = TargetInfo(
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_hidden_layers,
        dtype=model.dtype,
        device=model.device,
        embedding=model.get_input_embeddings().weight,
        lm_head=model.get_output_embeddings().weight,
        config=model.config,
        max_seq_len=model.config.max_position_embeddings,
    )
    return random_head(target)


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One configuration in its own process."""
    import torch

    import compilespec

    torch.set_num_threads(job["threads"])
    model = make_model(job["model"], job["dtype"])
    keywords: dict[str, Any] = {}
    if job["spec"] == "eagle3":
        keywords = {"draft": make_head(model), "num_draft_tokens": job["num_draft_tokens"]}
    longest = max(job["contexts"])
    start = time.perf_counter()
    engine: Any = compilespec.compile(
        model,
        spec=job["spec"],
        max_batch_size=max(job["batches"]),
        max_seq_len=longest + 512,
        backend=job["backend"],
        **keywords,
    )
    params = compilespec.SamplingParams(max_new_tokens=4, ignore_eos=True)
    engine.generate([[1, 2, 3]], params)
    cold_s = time.perf_counter() - start
    steps = [
        {"batch": batch, "context": context, "step_ms": time_steps(engine, batch, context)}
        for context in job["contexts"]
        for batch in job["batches"]
    ]
    num_recompiles = engine.stats().num_recompiles
    engine.close()
    return {"cold_s": cold_s, "steps": steps, "num_recompiles": num_recompiles}


def time_steps(engine: Any, batch: int, context: int) -> dict[str, float]:
    """Quantiles of a decode step in ms while `batch` requests of `context` prompt tokens run."""
    import torch

    import compilespec

    num_steps = NUM_STEPS.get(context, 30)
    generator = torch.Generator().manual_seed(context)
    # Room for every draft of every timed step to be accepted: no request may finish meanwhile.
    params = compilespec.SamplingParams(max_new_tokens=480, ignore_eos=True)
    prompts_BT = torch.randint(1, 2048, (batch, context), generator=generator)
    requests = [engine.submit(prompt, params) for prompt in prompts_BT.tolist()]
    # Prefill takes at most one step per request and chunk; then every step decodes the whole batch.
    before = engine.stats().num_verify_steps
    while engine.stats().num_verify_steps < before + 8 * batch:
        engine.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    for request in requests:
        engine.abort(request)
    for _ in range(2):  # rows are freed after the step in flight
        engine.step()
    return quantiles(times)


if __name__ == "__main__":
    print(MARK + json.dumps(child(json.loads(sys.argv[sys.argv.index("--child") + 1]))), flush=True)
