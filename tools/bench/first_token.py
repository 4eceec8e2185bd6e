"""Time to first token of a new process, with empty and with filled caches.

Each measurement is a new Python process, timed from just before it is started to its first token,
so that imports, loading, tracing and compiling all count.  The child then finishes its request, so
that code compiled after the first token is also in the caches when the next, warm process starts,
and says how much memory it had resident at most.  Beside each warm start a process loads the same
model and tokenizer with transformers and does no more: a start's own time is the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.bench import report
from tools.bench.gates import FIRST_TOKEN_LIMIT_S
from tools.bench.measure import quantiles
from tools.bench.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[2]
CACHE_VARIABLES = ("COMPILESPEC_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
MARK = "RESULT "


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if a limit is exceeded, else 0."""
    from tools.bench.speed import find_model  # not on top: children import this module

    alone = {"spec": None, "directory": str(find_model(options.model))}
    result: dict[str, Any] = {"benchmark": "first token", **report.environment(), "specs": {}}
    specs = [("none", None), ("eagle3", options.num_draft_tokens[0])]
    for spec, num_draft_tokens in specs:
        if options.only and options.only not in spec:
            continue
        job = {
            "model": options.model,
            "draft": str(options.draft) if options.draft and num_draft_tokens else None,
            "spec": spec,
            "num_draft_tokens": num_draft_tokens,
            "max_batch_size": max(options.batch),
            "backend": options.backend,
            "threads": options.threads,
            "prompt": next(iter(load_prompts(1).values())),
        }
        starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
        loads: list[dict[str, Any]] = []
        for number in range(options.cold_repeats):
            with tempfile.TemporaryDirectory(prefix="compilespec-first-token-") as folder:
                is_last = number == options.cold_repeats - 1
                for start in ["cold", *["warm"] * (options.repeats if is_last else 0)]:
                    console.print(f"{spec}: {start} start {len(starts[start]) + 1}")
                    starts[start].append(spawn("tools.bench.first_token", job, Path(folder)))
                    if start == "warm":
                        loads.append(spawn("tools.bench.first_token", alone, Path(folder)))
        result["specs"][spec] = {"job": job, **starts, "transformers": loads}
    failed, rows = False, []
    for spec, entry in result["specs"].items():
        for start in ("cold", "warm"):
            runs = entry[start]
            seconds = quantiles([r["first_token_s"] for r in runs])["p50"]
            entry[f"{start}_first_token_s"] = seconds
            limit = FIRST_TOKEN_LIMIT_S[start]
            failed |= seconds > limit
            medians = [
                quantiles([run[key] for run in runs])["p50"]
                for key in ("import_s", "compile_s", "peak_mib")
            ]
            cells = [f"{value:.1f}" for value in (seconds, *medians, limit)]
            judged = "[red]FAIL[/]" if seconds > limit else "[green]pass[/]"
            rows.append((spec, start, *cells, judged))
        if entry["transformers"]:
            loaded = quantiles([one["loaded_s"] for one in entry["transformers"]])["p50"]
            entry["transformers_loaded_s"] = loaded
            console.print(f"{spec}: transformers alone loads this model in {loaded:.1f} s")
    columns = ("spec", "start", "first token", "import", "compile", "peak MiB", "limit", "")
    report.print_table(console, "seconds from process start to first token", columns, rows)
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(failed)


def spawn(module: str, job: dict[str, Any], cache_dir: Path) -> dict[str, Any]:
    """Run `python -m module --child JOB` with its caches under `cache_dir`; returns its JSON.

    Raises:
        RuntimeError: the child failed; the message ends with its stderr.
    """
    env = dict(os.environ)
    for variable in CACHE_VARIABLES:
        env[variable] = str(cache_dir / variable.lower())
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    job = {**job, "started": time.time()}
    done = subprocess.run(
        [sys.executable, "-m", module, "--child", json.dumps(job)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return answer
    raise RuntimeError(
        f"{module} gave no result (exit status {done.returncode}):\n{done.stderr[-2000:]}"
    )


def child(job: dict[str, Any]) -> dict[str, Any]:
    """The measured process."""
    import torch

    if job["spec"] is None:
        return _load_alone(job)
    import compilespec

    torch.set_num_threads(job["threads"])
    imported = time.time()
    keywords = {key: job[key] for key in ("draft", "num_draft_tokens") if job[key] is not None}
    engine: Any = compilespec.compile(
        job["model"],
        spec=job["spec"],
        max_batch_size=job["max_batch_size"],
        backend=job["backend"],
        **keywords,
    )
    compiled = time.time()
    params = compilespec.SamplingParams(max_new_tokens=16, ignore_eos=True)
    deltas = iter(engine.stream([job["prompt"]], params))
    next(deltas)
    first_token = time.time()
    for _ in deltas:
        pass
    engine.close()
    return {
        "first_token_s": first_token - job["started"],
        "import_s": imported - job["started"],
        "compile_s": compiled - imported,
        "finished_s": time.time() - job["started"],
        "peak_mib": _peak_mib(),
    }


def _load_alone(job: dict[str, Any]) -> dict[str, Any]:
    """The target and its tokenizer as transformers loads them, and no more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(job["directory"], dtype="auto", local_files_only=True)
    AutoTokenizer.from_pretrained(job["directory"], local_files_only=True)
    return {"loaded_s": time.time() - job["started"], "peak_mib": _peak_mib()}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux: KiB


if __name__ == "__main__":
    print(MARK + json.dumps(child(json.loads(sys.argv[sys.argv.index("--child") + 1]))), flush=True)
