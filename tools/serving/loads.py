"""guidellm and aiperf against `compilespec serve`, on prompts that they make up themselves.

    python -m tools.serving.loads guidellm aiperf

Needs `pip install guidellm aiperf`, in this environment or on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from compilespec.demo import demo_directory
from tools.bench import report
from tools.serving.process import served

PROMPT_TOKENS, NEW_TOKENS = 64, 32
TIMEOUT_S = 900
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # with them aiperf takes no directory


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where a request failed, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="+", choices=list(TOOLS))
    parser.add_argument("--model", default="demo", help="a checkpoint directory, or demo")
    parser.add_argument("--spec", default="eagle3")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--name", default="serving-loads", help="results/NAME.json")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    result = measure(options)
    for tool, found in result["tools"].items():
        console.print(f"{tool}: {found}")
    console.print(f"written to {report.write_json(options.name, result)}")
    return int(any(one["num_requests"] != options.requests for one in result["tools"].values()))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What every tool found, one after the other, on one server."""
    model = str(demo_directory()) if options.model == "demo" else options.model
    arguments = ("--model", model, "--spec", options.spec, "--backend", options.backend,
                 "--served-model-name", "m", "--max-batch-size", "8")  # fmt: skip
    found = {}
    with served(*arguments) as url:
        for tool in options.tools:
            with tempfile.TemporaryDirectory(prefix=f"compilespec-{tool}-") as folder:
                found[tool] = TOOLS[tool](url, model, Path(folder), options)
    return {
        "benchmark": "serving-loads", **report.environment(), "model": options.model,
        "spec": options.spec, "backend": options.backend, "concurrency": options.concurrency,
        "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "tools": found,
    }  # fmt: skip


def guidellm(url: str, model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Streams at a constant number of requests."""
    out = folder / "out.json"
    _call(
        ["guidellm", "run",
         "--backend", f"kind=openai_http,target={url},model=m,request_format=/v1/completions",
         "--profile", f"kind=concurrent,streams={options.concurrency}",
         "--constraint", f"kind=max_requests,count={options.requests}",
         "--tokenizer", f"kind=huggingface_auto,model={model}",
         "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
         "--output", f"kind=json,path={out}", "--disable-console-interactive"],
        folder,
    )  # fmt: skip
    one = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]
    return {
        "num_requests": one["request_totals"]["successful"],
        "output_tokens_per_s": _of(one, "output_tokens_per_second", "mean"),
        "first_token_ms": _of(one, "time_to_first_token_ms", "median"),
        "between_tokens_ms": _of(one, "inter_token_latency_ms", "median"),
    }


def aiperf(url: str, model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Streams at a constant number of requests, with the drafts that the server counts."""
    _call(
        ["aiperf", "profile", "--model", "m", "--url", url, "--endpoint-type", "completions",
         "--streaming", "--tokenizer", model, "--use-server-token-count",
         "--concurrency", str(options.concurrency), "--request-count", str(options.requests),
         "--prompt-input-tokens-mean", str(PROMPT_TOKENS), "--prompt-input-tokens-stddev", "0",
         "--prompt-output-tokens-mean", str(NEW_TOKENS), "--prompt-output-tokens-stddev", "0",
         "--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(folder / "out"),
         "--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"],
        folder,
    )  # fmt: skip
    file = next((folder / "out").rglob("profile_export_aiperf.json"))
    told = json.loads(file.read_text(encoding="utf-8"))
    return {
        "num_requests": int(_of(told, "request_count", "avg") or 0),
        "output_tokens_per_s": _of(told, "output_token_throughput", "avg"),
        "first_token_ms": _of(told, "time_to_first_token", "p50"),
        "between_tokens_ms": _of(told, "inter_token_latency", "p50"),
        "accepted_drafts": _of(told, "usage_accepted_prediction_tokens", "avg"),
        "rejected_drafts": _of(told, "usage_rejected_prediction_tokens", "avg"),
    }


Load = Callable[[str, str, Path, argparse.Namespace], dict[str, Any]]
TOOLS: Mapping[str, Load] = {"guidellm": guidellm, "aiperf": aiperf}


def _of(found: Mapping[str, Any], metric: str, statistic: str) -> float | None:
    """A statistic of a metric, whichever of the successful and the others it is kept beside."""
    one = found.get(metric) or {}
    value = one.get("successful", one).get(statistic) if isinstance(one, dict) else None
    return None if value is None else round(float(value), 3)


def _call(command: Sequence[str], folder: Path) -> None:
    """Run a tool of this environment.  Raises: RuntimeError with what it printed."""
    place = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(command[0], path=place)
    if program is None:
        raise RuntimeError(f"there is no {command[0]}: pip install {command[0]}")
    env = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    done = subprocess.run(
        [program, *command[1:]], env=env, cwd=folder, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"{command[0]} failed ({done.returncode}):\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        )


if __name__ == "__main__":
    sys.exit(main())
