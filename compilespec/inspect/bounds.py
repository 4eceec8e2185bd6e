"""The indices of a program that are proved to be inside their tensors, and those that are
guarded.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch

from compilespec.inspect.stages import context_of
from compilespec.passes.proofs.claims import Claim, find_claims, operand_at, unguarded
from compilespec.passes.proofs.ranges import Ranges
from compilespec.passes.proofs.sizes import NUM_TABLE_BLOCKS, Range, Sizes
from compilespec.program import PhaseGraph, SpecProgram, StepKey

Status = Literal["proved", "guarded", "open"]

HAZARDS = "H-9: positions before 0; H-16: past the maximum length; H-14: attention's inputs written"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One claim about one node, as `dump --bounds` shows it."""

    step: str  # "decode, K=3": `str` of a `StepKey`
    what: str  # "slot inside the cache, or -1"
    node: str
    module: str  # path in the model or drafter; else the pass that made the node
    value: str  # the range before any guard, in named sizes; "" where there is none
    numbers: str  # the same, the sizes of this program filled in
    needed: str
    status: Status  # "open": not proved, and nothing to insert
    hazards: tuple[str, ...]
    detail: str


@dataclass(frozen=True, kw_only=True)
class BoundsReport:
    """Every claim about the graphs of a program."""

    bounds: tuple[Bound, ...]

    @property
    def num_open(self) -> int:
        return sum(bound.status == "open" for bound in self.bounds)

    def of_hazard(self, hazard: str) -> tuple[Bound, ...]:
        return tuple(bound for bound in self.bounds if hazard in bound.hazards)

    def to_dict(self) -> dict[str, Any]:
        return {
            "counts": dict(collections.Counter(bound.status for bound in self.bounds)),
            "bounds": [vars(bound) for bound in self.bounds],
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """One row for all equal claims about a graph: count, claim, place, range, needed range,
        status, hazards.
        """
        groups: dict[tuple[Any, ...], list[Bound]] = {}
        for bound in self.bounds:
            key = (bound.step, bound.what, bound.value, bound.needed, bound.status, bound.detail)
            groups.setdefault(key, []).append(bound)
        for (step, what, value, needed, status, detail), group in groups.items():
            where = f"{group[0].node} ({group[0].module})"
            shown = value if value == group[0].numbers else f"{value} = {group[0].numbers}"
            count = str(len(group)) if len(group) > 1 else ""
            hazards = " ".join(group[0].hazards)
            yield step, count, what, where, shown or detail, needed, status, hazards

    def summary(self) -> str:
        counts = collections.Counter(bound.status for bound in self.bounds)
        parts = [f"{counts[status]} {status}" for status in ("proved", "guarded", "open")]
        return f"{len(self.bounds)} claims: {', '.join(parts)}"

    def __str__(self) -> str:
        lines = [self.summary()]
        width = max((len(bound.step) for bound in self.bounds), default=0) + 1
        for step, count, what, where, shown, needed, status, hazards in self.rows():
            times = f" x{count}" if count else ""
            text = f"  {step:{width}}{status:8}{what}{times}: {shown}"
            text += f" in {needed}" if needed else ""
            lines.append(f"{text}; {where}" + (f" [{hazards}]" if hazards else ""))
        return "\n".join([*lines, HAZARDS])

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title=self.summary(), caption=HAZARDS, box=None, pad_edge=False)
        table.title_justify = table.caption_justify = "left"
        for name in ("status", "x", "claim", "range", "needed", "at", "hazard"):
            table.add_column(name, overflow="fold")
        styles = {"proved": "green", "guarded": "yellow", "open": "red"}
        last = ""
        for step, count, what, where, shown, needed, status, hazards in self.rows():
            if step != last:
                table.add_section()
                table.add_row("", "", f"[bold]{step}[/]")
                last = step
            cells = (cell.replace("[", "\\[") for cell in (what, shown, needed, where, hazards))
            table.add_row(f"[{styles[status]}]{status}[/]", count, *cells)
        return table


def prove(program: SpecProgram) -> BoundsReport:
    """Check every claim about the final ATen graphs of a program (`passes/proofs/claims.py`).

    What the graphs' inputs may hold is `passes.proofs.input_ranges.CONTRACT`.  A claim is "guarded"
    when the pass `bound_positions` made the operand it is about.
    """
    bounds = [
        _bound(key, claim, ranges)
        for key, graph in program.graphs.items()
        for ranges in [_ranges(graph, program)]
        for claim in find_claims(ranges)
    ]
    return BoundsReport(bounds=tuple(bounds))


def _ranges(graph: PhaseGraph, program: SpecProgram) -> Ranges:
    sizes = Sizes(context_of(graph).config, program.config.vocab_size)
    inputs = {spec.name: spec for spec in graph.inputs}
    return Ranges(graph.graph_module, sizes, inputs, program.weights)


def _bound(key: StepKey, claim: Claim, ranges: Ranges) -> Bound:
    custom = claim.node.meta.get("custom") or {}
    value = claim.value
    if claim.is_guarded and claim.place:
        value = ranges.of(unguarded(operand_at(claim.node, claim.place)))
    status: Status = "open"
    if claim.holds:
        status = "guarded" if claim.is_guarded else "proved"
    return Bound(
        step=str(key),
        what=claim.what,
        node=claim.node.name,
        module=str(custom.get("module") or custom.get("fragment") or custom.get("pass", "")),
        value=_shown(value),
        numbers=_shown(value, ranges.sizes),
        needed=_shown(claim.needed) if value is not None or not claim.holds else "",
        status=status,
        hazards=claim.hazards,
        detail=claim.detail,
    )


def _shown(value: Range | None, sizes: Sizes | None = None) -> str:
    if value is None:
        return ""
    for dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        if (value.low, value.high) == (limits.min, limits.max):
            return str(dtype).removeprefix("torch.")
    if sizes is not None:
        return str(Range(sizes.value(value.low), sizes.value(value.high)))
    blocks = {NUM_TABLE_BLOCKS: sympy.Symbol("M")}  # ceiling(max_seq_len / block_size)
    return str(Range(value.low.xreplace(blocks), value.high.xreplace(blocks)))
