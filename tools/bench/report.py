"""The results of a run: one JSON file, and tables for people."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tools.bench.check import Comparison
from tools.bench.gates import Verdict

RESULTS_DIR = Path(__file__).with_name("results")
PACKAGES = ("torch", "transformers", "triton", "compilespec", "llama-cpp-python")


def environment() -> dict[str, object]:
    """Commit, versions and device, without which a number means nothing."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_name() -> str:
    """The processor's name, with the matrix extensions that decide bf16 speed."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in info.read_text().splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    flags = fields.get("flags", "").split()
    extras = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *extras])


def write_json(name: str, content: Mapping[str, Any], folder: Path = RESULTS_DIR) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return path


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """The first column is text, the others are numbers."""
    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def print_check(console: Console, comparisons: Sequence[Comparison]) -> None:
    """One row per way and batch: how many texts are identical, and margins where others part."""
    groups: dict[tuple[str, int], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.way, comparison.batch), []).append(comparison)
    rows = []
    for (way, batch), group in groups.items():
        parted = [c for c in group if c.first_difference is not None]
        first = min(parted, key=lambda c: c.first_difference or 0, default=None)
        worst = max(group, key=lambda c: c.worst_margin / c.bound)
        rows.append((
            way, batch, f"{len(group) - len(parted)}/{len(group)}",
            f"{first.prompt}[{first.first_difference}]" if first else "-",
            f"{max(abs(c.margin or 0.0) for c in parted):.3g}" if parted else "-",
            f"{worst.worst_margin:.3g} / {worst.bound:.3g}" + ("" if worst.ok else " FAIL"),
        ))  # fmt: skip
    columns = ("way", "batch", "identical", "first difference", "margin there", "worst / bound")
    print_table(console, "outputs beside transformers eager (batch 1)", columns, rows)


def print_speeds(
    console: Console, batch: int, speeds: Mapping[str, Mapping[str, Any]], baseline: str
) -> None:
    apart = ("decode alone", "first token, ms") if "first_token_ms" in speeds[baseline] else ()
    base = speeds[baseline]["tokens_per_s"]["p50"]
    rows = []
    for way, summary in speeds.items():
        rate, length = summary["tokens_per_s"], summary.get("acceptance_length")
        keys = ("decode_tokens_per_s", "first_token_ms") if apart else ()
        rows.append((
            way, *(f"{rate[q]:,.0f}" for q in ("p20", "p50", "p80")),
            f"{summary['tokens_per_s_whole_run']:,.0f}", f"{rate['p50'] / base:.2f}",
            f"{length:.2f}" if length is not None else "-",
            *(f"{summary[key]['p50']:,.0f}" for key in keys),
        ))  # fmt: skip
    columns = ("way", "p20", "p50", "p80", "whole run", "x eager", "accepted", *apart)
    title = f"batch {batch}: generated tokens per second, prefill included"
    print_table(console, title, columns, rows)


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    rows = []
    for verdict in verdicts:
        word = "pass" if verdict.passed else "FAIL" if verdict.gate.required else "goal missed"
        colour = {"pass": "green", "FAIL": "red"}.get(word, "yellow")
        needed = f"{verdict.gate.ratio:.2f}" + ("" if verdict.gate.required else " (goal)")
        rows.append((
            verdict.way, verdict.batch, verdict.against, needed, f"{verdict.ratio:.2f}",
            f"[{colour}]{word}[/]",
        ))  # fmt: skip
    columns = ("way", "batch", "against", "needed", "measured", "")
    print_table(console, "gates (ratio of medians)", columns, rows)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
