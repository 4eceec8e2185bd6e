"""`python -m tools.gpu_check`: the gpu tests and the GPU benchmark, within ten minutes on one GPU.

Random weights at real sizes, drafts accepted by force; writes one JSON file.  `--smoke` runs all of
it on the CPU with tiny models and emulated graphs, in seconds: it measures nothing, but shows that
the code works.  `--without-gpu` shows what can be shown of the CUDA path without one: every step
compiled to machine code, and engines on that code, interpreted (`tools.without_gpu`).
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bench import report
from tools.bench.measure import quantiles
from tools.gpu.models import SHAPES, SMOKE_SHAPES, Shape, make_target, num_bytes_read
from tools.gpu.steps import copy_bytes_per_s, count_launches, time_steps
from tools.without_gpu.prove import PARTS, prove

ROOT = Path(__file__).resolve().parents[1]


@dataclass(kw_only=True)
class Run:
    """What all measurements share: the device, the time left, and what was skipped."""

    device: torch.device
    dtype: torch.dtype
    backend: str
    cudagraphs: str
    shapes: dict[str, Shape]
    num_steps: int
    num_tokens: int
    """New tokens of a timed `generate`."""
    copy_bytes: int
    is_smoke: bool
    deadline: float
    skipped: list[str] = field(default_factory=list)

    def has_time(self, what: str, seconds: float) -> bool:
        """Whether `seconds` are left; if not, `what` is recorded as skipped."""
        if time.monotonic() + seconds <= self.deadline:
            return True
        self.skipped.append(f"{what}: less than {seconds:.0f} s were left")
        return False


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, no speeds")
    parser.add_argument("--without-gpu", action="store_true", help="compile and interpret instead")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit (default: 10)")
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), help="models to measure")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=(), metavar="PART",
                        help="of --without-gpu, in place of all: " + ", ".join(PARTS))  # fmt: skip
    parser.add_argument("--no-tests", action="store_true", help="skip the gpu tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: results/gpu-check.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 if a test failed or a program recompiled; 2 without a GPU."""
    options = parse(arguments)
    if options.without_gpu:
        return prove(options.json or report.RESULTS_DIR / "without-gpu.json", options.parts)
    if not options.smoke and not torch.cuda.is_available():
        print("gpu_check: no CUDA device; --smoke runs the same code on the CPU", file=sys.stderr)
        return 2
    run = make_run(options)
    result: dict[str, Any] = {
        "benchmark": "gpu check",
        **report.environment(),
        "is_smoke": run.is_smoke,
        "dtype": str(run.dtype),
        "copy_gb_per_s": copy_bytes_per_s(run.device, run.copy_bytes) / 1e9,
        "models": {},
    }
    started = time.monotonic()
    if not options.no_tests and not options.smoke:
        result["tests"] = run_tests(run)
    for name, shape in run.shapes.items():
        if run.has_time(name, 0 if run.is_smoke else 60):
            result["models"][name] = measure_model(name, shape, run, result["copy_gb_per_s"])
    result |= {"skipped": run.skipped, "elapsed_s": time.monotonic() - started}
    folder, stem = report.RESULTS_DIR, "gpu-check"
    if options.json is not None:
        folder, stem = options.json.parent, options.json.stem
    print(f"written to {report.write_json(stem, result, folder)}")
    return 1 if is_broken(result) else 0


def make_run(options: argparse.Namespace) -> Run:
    shapes = SMOKE_SHAPES if options.smoke else SHAPES
    wanted = options.only or list(shapes)
    return Run(
        device=torch.device("cpu" if options.smoke else "cuda"),
        dtype=torch.float32 if options.smoke else torch.bfloat16,
        backend="eager" if options.smoke else "inductor",
        cudagraphs="full_and_piecewise",
        shapes={name: shape for name, shape in shapes.items() if name in wanted},
        num_steps=2 if options.smoke else 30,
        num_tokens=4 if options.smoke else 64,
        copy_bytes=2**20 if options.smoke else 2**30,
        is_smoke=options.smoke,
        deadline=time.monotonic() + 60 * options.minutes,
    )


def is_broken(result: dict[str, Any]) -> bool:
    programs = [p for model in result["models"].values() for p in model["programs"]]
    return bool(
        result.get("tests", {}).get("exit_status") or any(p.get("num_recompiles") for p in programs)
    )


def run_tests(run: Run) -> dict[str, Any]:
    """Run the tests that need a GPU in a separate process, in at most a third of the time."""
    limit_s = (run.deadline - time.monotonic()) / 3
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"exit_status": 124, "summary": [f"stopped after {limit_s:.0f} s"]}
    return {"exit_status": done.returncode, "summary": done.stdout.splitlines()[-15:]}


def measure_model(name: str, shape: Shape, run: Run, copy_gb_per_s: float) -> dict[str, Any]:
    """Measure plain decoding, every forced acceptance length and transformers, as time allows."""
    model = make_target(shape, run.dtype, run.device)
    programs = []
    for what, keywords in programs_of(model, shape):
        if not run.has_time(f"{name} {what}", 0 if run.is_smoke else 45):
            continue
        programs.append({"program": what, **measure_program(model, shape, run, keywords)})
        for step in programs[-1]["steps"]:
            if step["gb_per_s"] is not None:
                step["share_of_copy"] = step["gb_per_s"] / copy_gb_per_s
    theirs = {}
    for what, seconds, extra in transformers_ways(run):
        if run.has_time(f"{name} {what}", seconds):
            theirs[what] = time_generate(partial(generate, model, shape, run, extra), run)
    for program in programs:
        program["ratio"] = {
            what: program["tokens_per_s"]["p50"] / rate["p50"] for what, rate in theirs.items()
        }
    free()
    return {"config": dict(shape.config), "programs": programs, "transformers": theirs}


def programs_of(model: Any, shape: Shape) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plain decoding, then the extremes of acceptance, then the lengths between them."""
    yield "plain", {"spec": "none"}
    from tools.bench.milestone import make_head

    head, count = make_head(model), shape.num_draft_tokens
    for forced in sorted(shape.forced, key=lambda n: (n not in (0, count), n)):
        accepted = {"force_num_accepted": forced} if forced else {}
        keywords = {"spec": "eagle3", "draft": head, "num_draft_tokens": count, **accepted}
        yield f"eagle3 K={count}, {forced or 'no'} drafts forced", keywords


def measure_program(model: Any, shape: Shape, run: Run, keywords: dict[str, Any]) -> dict[str, Any]:
    import compilespec

    free()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    room = (shape.num_draft_tokens + 1) * (3 * run.num_steps + run.num_tokens + 16)
    started = time.perf_counter()
    engine = compilespec.compile(
        model, max_batch_size=max(shape.batches), max_seq_len=min(shape.context + room,
        shape.config["max_position_embeddings"]), backend=run.backend, cudagraphs=run.cudagraphs,
        enable_prefix_caching=False, **keywords,
    )  # fmt: skip
    ready_s = time.perf_counter() - started
    with engine:
        runner: Any = engine.executor
        lowered = runner.lowered
        steps = [measure_steps(runner, model, batch, shape, run) for batch in shape.batches]
        prompt = prompt_of(shape, 0)
        params = compilespec.SamplingParams(max_new_tokens=run.num_tokens, ignore_eos=True)
        rate = time_generate(lambda: engine.generate([prompt], params), run)
        return {
            "ready_s": ready_s,
            "compile_s": {name: cost["seconds"] for name, cost in lowered.costs().items()},
            "cudagraphs": engine.plan().get("cudagraphs"),
            "steps": steps,
            "tokens_per_s": rate,
            "num_recompiles": engine.stats().num_recompiles,
            "peak_memory_gib": peak_gib(run.device),
        }


def measure_steps(runner: Any, model: Any, batch: int, shape: Shape, run: Run) -> dict[str, Any]:
    """Time the steps of a batch whose prompts have been prefilled."""
    from compilespec.runtime.executor import PrefillChunk

    sizes, rows = runner.geometry, list(range(batch))
    for row in rows:
        first = row * sizes.blocks_per_row
        runner.set_blocks(row, list(range(first, first + sizes.blocks_per_row)))
        tokens = prompt_of(shape, row)
        for start in range(0, len(tokens), sizes.max_prefill_tokens):
            part = tokens[start : start + sizes.max_prefill_tokens]
            end = start + len(part)
            following = tokens[end] if end < len(tokens) else None
            runner.prefill(
                [PrefillChunk(row=row, start=start, tokens=tuple(part), next_token=following)]
            )

    def launch() -> Any:
        return runner.launch_decode(rows)

    emitted = [len(tokens) for tokens in runner.collect(launch())]
    times = time_steps(launch, runner.collect, run.device, run.num_steps)
    step_s = times["step_ms"]["p50"] / 1e3
    is_dense = "num_experts" not in shape.config
    weights = num_bytes_read(runner.weights, model) if is_dense else None
    return {
        "batch": batch,
        "context": shape.context,
        "emitted_per_row": sum(emitted) / batch,
        **times,
        "launches": count_launches(launch, run.device),
        "weight_gb": None if weights is None else weights / 1e9,
        "gb_per_s": None if weights is None else weights / 1e9 / step_s,
    }


def transformers_ways(run: Run) -> list[tuple[str, float, dict[str, Any]]]:
    """Names, time limits in seconds, and keywords of `generate`."""
    ways: list[tuple[str, float, dict[str, Any]]] = [("eager", 0 if run.is_smoke else 15, {})]
    if not run.is_smoke:
        ways.append(("compiled", 90, {"cache_implementation": "static"}))
    return ways


def generate(model: Any, shape: Shape, run: Run, extra: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    ids_1T = torch.tensor([prompt_of(shape, 0)], device=run.device)
    model.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False,
        max_new_tokens=run.num_tokens, **extra,
    )  # fmt: skip


def time_generate(call: Callable[[], Any], run: Run) -> dict[str, float]:
    """Tokens per second of one prompt, prefill included, after a warm-up call."""
    rates = []
    for _ in range(2 if run.is_smoke else 4):
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        start = time.perf_counter()
        call()
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        rates.append(run.num_tokens / (time.perf_counter() - start))
    return quantiles(rates[1:])


def prompt_of(shape: Shape, row: int) -> list[int]:
    return [
        (7 * row + 3 * place) % (shape.config["vocab_size"] - 3) + 3
        for place in range(shape.context)
    ]


def peak_gib(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**30


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
