"""The reports of a run: a log, a table, two plots and the drafter's card."""

from __future__ import annotations

import csv
import dataclasses
import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compilespec.training.files import replace_text
from compilespec.training.measure import MeasuredAcceptance
from compilespec.training.options import TrainOptions
from compilespec.training.plots import Curve, draw


@dataclass(kw_only=True)
class Record:
    """One step."""

    step: int
    loss: float
    losses: list[float]
    """By draft step."""
    right: list[float]
    """The share of places where all draft steps up to this one chose the target's token."""
    learning_rate: float
    norm: float
    """The norm of the gradients before clipping."""
    num_tokens: int
    seconds: float
    acceptance: MeasuredAcceptance | None = None

    def as_json(self) -> dict[str, Any]:
        given = {name: _rounded(value) for name, value in dataclasses.asdict(self).items()}
        if self.acceptance is None:
            del given["acceptance"]
        return given


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of the card beside the log."""

    spec: str
    model: str
    num_trained: int
    num_samples: int
    num_held_out: int
    domains: Mapping[str, int]
    options: TrainOptions
    finished: bool


def write_reports(output: Path, records: Sequence[Mapping[str, Any]], facts: Facts) -> None:
    """Write `training/metrics.csv`, `training/loss.svg`, `training/acceptance.svg`, `README.md`.

    Raises: CheckpointError.
    """
    if not records:
        return
    folder = output / "training"
    replace_text(folder / "metrics.csv", _table(records))
    depth = len(records[0]["losses"])
    losses = [
        Curve(
            name=f"draft step {step + 1}",
            points=tuple((r["step"], r["losses"][step]) for r in records),
        )
        for step in range(depth)
    ]
    replace_text(folder / "loss.svg", draw("loss by step, nats", losses, smooth=20))
    measured = [r for r in records if "acceptance" in r]
    curves = [
        Curve(
            name="held out, by the engine",
            points=tuple((r["step"], r["acceptance"]["overall"]) for r in measured),
        ),
        Curve(
            name="along the data",
            points=tuple((r["step"], 1 + sum(r["right"])) for r in records),
        ),
    ]
    replace_text(
        folder / "acceptance.svg", draw("tokens per verify step, greedy", curves, smooth=20)
    )
    replace_text(output / "README.md", card(records, measured, facts))


def card(
    records: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], facts: Facts
) -> str:
    """The card of the drafter, as Markdown."""
    options, last = facts.options, records[-1]
    domains = ", ".join(f"{name} {count}" for name, count in sorted(facts.domains.items()))
    lines = [
        f"# {facts.spec} drafter for {facts.model}",
        "",
        f"Trained with compilespec {version('compilespec')}; "
        + ("" if facts.finished else "the run has not ended yet; ")
        + f"{facts.num_trained / 1e6:.2f}M parameters, layout {options.layout}.",
        "",
        "```python",
        f'compilespec.compile("TARGET", "{facts.spec}", draft="THIS FOLDER")',
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| sequences to learn from | {facts.num_samples} ({domains}) |",
        f"| held out | {facts.num_held_out} |",
        f"| steps | {last['step'] + 1}, {last['num_tokens']:,} tokens |",
        f"| training | {last['seconds'] / 60:.0f} minutes on {platform.machine()} |",
        f"| loss of each draft step | {_list(last['losses'])} |",
        f"| learning rate, batch, depth | {options.learning_rate:g}, {options.batch_tokens} tokens,"
        f" {options.depth} |",
        "",
    ]
    if measured:
        best = max(measured, key=lambda r: float(r["acceptance"]["overall"]))
        found = best["acceptance"]
        lines += [
            f"Acceptance length, greedy, K = {options.num_draft_tokens}, on {found['num_prompts']} "
            f"held-out prompts, measured by the engine after step {best['step']} (this is the head "
            f"that is kept): **{found['overall']:.2f}**",
            "",
            *(f"- {name}: {length:.2f}" for name, length in found["by_domain"].items()),
            "",
        ]
    lines += ["![loss](training/loss.svg)", "", "![acceptance](training/acceptance.svg)", ""]
    return "\n".join(lines)


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    num_losses, depth = len(records[0]["losses"]), len(records[0]["right"])
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["step", "loss", *(f"loss_{i + 1}" for i in range(num_losses)),
         *(f"right_{i + 1}" for i in range(depth)),
         "learning_rate", "norm", "tokens", "seconds", "acceptance"]
    )  # fmt: skip
    for r in records:
        found = r.get("acceptance")
        table.writerow(
            [r["step"], r["loss"], *r["losses"], *r["right"], r["learning_rate"], r["norm"],
             r["num_tokens"], r["seconds"], found["overall"] if found else ""]
        )  # fmt: skip
    return text.getvalue()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return value


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
