"""The cost of a step: FLOPs and bytes in B, K, T, R and context length C, and the roofline time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from compilespec import _torch_compat
from compilespec.inspect.devices import Device, find_device
from compilespec.inspect.node_costs import C, Cost, NodeCosts
from compilespec.passes.proofs.sizes import B, Expr, K, R, T
from compilespec.passes.splice.shard_weights import collectives_of
from compilespec.program import ByStep, InputSpec, PhaseGraph, SpecProgram, StepKey


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """The cost of a part of a step, all its repetitions together."""

    name: str
    cost: Cost
    ms: float | None = None  # roofline time at the report's sizes


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One graph: its parts in order, its modules, and the whole graph after each pass."""

    key: StepKey
    total: CostRow
    stages: tuple[CostRow, ...]
    modules: tuple[CostRow, ...]
    passes: tuple[CostRow, ...]  # ATen passes, where the program kept their graphs
    collectives: Mapping[str, int]  # messages between ranks, by operator
    uncounted: Mapping[str, int]  # operators that are neither counted nor assumed fused


@dataclass(frozen=True, kw_only=True)
class CostReport:
    """Every graph; times and amounts are shown for `sizes`, and for each graph's own K."""

    graphs: ByStep[StepCost]
    sizes: Mapping[Expr, int]
    device: Device | None = field(default=None)
    weight_memory: int = 0
    """Bytes of all weights that the graphs read, a rank's own in tensor parallelism."""
    cache_memory_per_token: int = 0
    """Bytes of a token in all caches, a rank's own in tensor parallelism."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "sizes": {str(symbol): value for symbol, value in self.sizes.items()},
            "device": vars(self.device) if self.device is not None else None,
            "weight_memory": self.weight_memory,
            "cache_memory_per_token": self.cache_memory_per_token,
            "phases": {
                self.graphs.name(key): {
                    "total": self._row_dict(one, one.total),
                    "stages": [self._row_dict(one, row) for row in one.stages],
                    "modules": [self._row_dict(one, row) for row in one.modules],
                    "passes": [self._row_dict(one, row) for row in one.passes],
                    "uncounted": dict(one.uncounted),
                    "collectives": dict(one.collectives),
                }
                for key, one in self.graphs.items()
            },
        }

    def _sizes(self, one: StepCost) -> dict[Expr, int]:
        return {**self.sizes, K: one.key.num_draft_tokens}

    def _row_dict(self, one: StepCost, row: CostRow) -> dict[str, Any]:
        amounts = row.cost.at(self._sizes(one))
        return {
            "name": row.name,
            "formulas": {name: str(readable(expr)) for name, expr in vars(row.cost).items()},
            "amounts": {name: int(expr) for name, expr in vars(amounts).items()},
            "ms": row.ms,
        }

    def formulas(self, one: StepCost) -> Iterator[tuple[str, str]]:
        """The totals of a graph as (quantity, expression)."""
        cost = one.total.cost
        yield "FLOPs", str(readable(cost.flops))
        yield "weight bytes", str(readable(cost.weight_bytes))
        yield "KV cache bytes", str(readable(cost.cache_bytes))
        yield "activation bytes", str(readable(cost.activation_bytes))
        if one.collectives:
            names = ", ".join(f"{name} x{count}" for name, count in one.collectives.items())
            yield "bytes sent", f"{readable(cost.sent_bytes)} by a rank, in {names}"

    def rows(self, one: StepCost) -> Iterator[tuple[str, ...]]:
        """(group, name, FLOPs, weight, cache, activation bytes, time and limit) at the sizes."""
        groups = (("stage", one.stages), ("module", one.modules), ("after pass", one.passes))
        for group, rows in groups:
            for row in rows:
                yield (group, row.name, *self._amounts(one, row))
        yield ("total", str(one.key), *self._amounts(one, one.total))

    def _amounts(self, one: StepCost, row: CostRow) -> tuple[str, ...]:
        cost = row.cost.at(self._sizes(one))
        time = ""
        if row.ms is not None and self.device is not None:
            memory_ms = float(cost.num_bytes) / self.device.bytes_per_s * 1e3
            compute_ms = float(cost.flops) / self.device.flops_per_s * 1e3
            time = f"{row.ms:.4g} ms, {'memory' if memory_ms >= compute_ms else 'compute'}"
        amounts = (cost.flops, cost.weight_bytes, cost.cache_bytes, cost.activation_bytes)
        return (*(_scaled(int(amount)) for amount in amounts), time)

    def __str__(self) -> str:
        lines = [self._heading()]
        for one in self.graphs.values():
            lines.append(f"{one.key}:")
            lines += [f"  {name:17}{formula}" for name, formula in self.formulas(one)]
            lines.append(f"  {'':52}{'FLOPs':>8}{'weights':>9}{'cache':>9}{'activ.':>9}  time")
            for group, name, flops, weights, cache, activations, time in self.rows(one):
                label = f"{group:11}{name}"
                lines.append(
                    f"  {label:52}{flops:>8}{weights:>9}{cache:>9}{activations:>9}  {time}"
                )
            lines += [f"  not counted: {name} x{count}" for name, count in one.uncounted.items()]
        return "\n".join(lines)

    def _heading(self) -> str:
        sizes = ", ".join(f"{symbol} = {value}" for symbol, value in self.sizes.items())
        device = f"; {self.device}" if self.device is not None else ""
        weights, cache = _scaled(self.weight_memory), _scaled(self.cache_memory_per_token)
        memory = f"memory: {weights}B of weights, {cache}B of cache a token"
        return f"cost at {sizes}{device}; {memory}"

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        parts: list[Any] = [self._heading()]
        for one in self.graphs.values():
            lines = [f"[bold]{one.key}[/]"]
            lines += [f"  {name:17}{formula}" for name, formula in self.formulas(one)]
            table = Table(box=None, pad_edge=False)
            table.add_column("")
            table.add_column("part", overflow="fold")
            for name in ("FLOPs", "weights", "cache", "activations"):
                table.add_column(name, justify="right")
            table.add_column("roofline")
            last = ""
            for group, *cells in self.rows(one):
                table.add_row("" if group == last else f"[dim]{group}[/]", *cells)
                last = group
            parts += ["\n".join(lines), table]
            parts += [f"  not counted: {name} x{count}" for name, count in one.uncounted.items()]
        return Group(*parts)


def estimate(
    program: SpecProgram,
    *,
    device: Device | str | None = None,
    batch_size: int = 1,
    context_length: int = 1024,
    num_prompt_tokens: int = 512,
    num_prompts: int = 1,
) -> CostReport:
    """FLOPs and bytes of every final graph of a program (`node_costs.py` says what is counted).

    B is the decode batch, T and R the packed tokens and prompts of a prefill call, C the keys each
    token attends to (in prefill the mean), K the number of drafts.  A formula's value at a graph's
    own K is exact; its form in K takes the copies of a draft loop's last, repeated part to be
    as many as K says.

    Args:
        device: for times: a `Device`, or a name that `find_device` knows; None shows none.
        batch_size, context_length, num_prompt_tokens, num_prompts: numbers for B, C, T and R.
    """
    sizes = {B: batch_size, K: program.config.num_draft_tokens, C: context_length}
    sizes |= {T: num_prompt_tokens, R: num_prompts}
    if isinstance(device, str):
        device = find_device(device, program.config.dtype)
    graphs = ByStep(_step_cost(graph, sizes, device) for graph in program.graphs.values())
    return CostReport(
        graphs=graphs,
        sizes=sizes,
        device=device,
        weight_memory=weight_memory(program),
        cache_memory_per_token=program.cache_bytes_per_token,
    )


def weight_memory(program: SpecProgram) -> int:
    """Bytes of the weights that some graph reads, each storage once."""
    names = {
        source
        for graph in program.graphs.values()
        for spec in graph.inputs
        if spec.kind == "weight"
        for source in spec.sources
    }
    found: dict[tuple[int, ...], int] = {}
    for name in names:
        weight = program.weights[name]
        place = _torch_compat.storage_place(weight)
        found[place] = max(found.get(place, 0), weight.nbytes)
    return sum(found.values())


def _step_cost(phase: PhaseGraph, sizes: Mapping[Expr, int], device: Device | None) -> StepCost:
    num_draft_tokens = phase.key.num_draft_tokens
    sizes = {**sizes, K: num_draft_tokens}
    inputs = {spec.name: spec for spec in phase.inputs}
    costs = NodeCosts(phase.graph_module.graph, inputs, num_draft_tokens)
    parts = [_CountedNode(node, cost) for node, cost in costs]
    times = {cost: _roofline_ms(cost.at(sizes), device) for cost in {p.cost for p in parts}}
    weights = _weights_of_copies(parts, num_draft_tokens)

    def row(name: str, chosen: list[_CountedNode]) -> CostRow:
        total = sum((part.cost * weights[part.copy] for part in chosen), Cost()).expanded()
        ms = sum(times[part.cost] or 0.0 for part in chosen) if device is not None else None
        return CostRow(name=name, cost=total, ms=ms)

    stages = _grouped(parts, lambda part: _stage_name(part, weights))
    modules = _grouped(parts, lambda part: f"{part.fragment} {part.module}".strip())
    return StepCost(
        key=phase.key,
        total=row(str(phase.key), parts),
        stages=tuple(row(name, chosen) for name, chosen in stages.items()),
        modules=tuple(row(name, chosen) for name, chosen in modules.items()),
        passes=tuple(_after_passes(phase, inputs, num_draft_tokens)),
        uncounted=costs.uncounted(),
        collectives=collectives_of(phase.graph_module.graph),
    )


class _CountedNode:
    """A counted node: where it comes from, and its cost."""

    def __init__(self, node: fx.Node, cost: Cost) -> None:
        custom = node.meta.get("custom") or {}
        self.cost = cost
        self.fragment = str(custom.get("fragment") or custom.get("pass", ""))
        self.copy = (self.fragment, int(custom.get("copy", 0)))
        self.module = re.sub(r"\.\d+(?=\.|$)", ".*", str(custom.get("module", "")))


def _grouped(parts: list[_CountedNode], name: Any) -> dict[str, list[_CountedNode]]:
    groups: dict[str, list[_CountedNode]] = {}
    for part in parts:
        if part.cost != Cost():
            groups.setdefault(name(part), []).append(part)
    return groups


def _weights_of_copies(
    parts: list[_CountedNode], num_draft_tokens: int
) -> dict[tuple[str, int], Expr]:
    """The factor of each copy of a fragment: a loop's equal last copies count as one, times an
    expression in K.
    """
    totals: dict[tuple[str, int], Cost] = {}
    for part in parts:
        totals[part.copy] = totals.get(part.copy, Cost()) + part.cost
    weights: dict[tuple[str, int], Expr] = dict.fromkeys(totals, sympy.Integer(1))
    for fragment in {copy[0] for copy in totals}:
        copies = sorted(copy for copy in totals if copy[0] == fragment)
        costs = [totals[copy].expanded() for copy in copies]
        is_loop = len(copies) > 1 and abs(len(copies) - num_draft_tokens) <= 1
        if is_loop:
            num_equal = next(
                (n for n, cost in enumerate(reversed(costs)) if cost != costs[-1]), len(costs)
            )
            weights.update(dict.fromkeys(copies[-num_equal:], sympy.Integer(0)))
            weights[copies[-num_equal]] = K + (num_equal - num_draft_tokens)
    return weights


def _stage_name(part: _CountedNode, weights: Mapping[tuple[str, int], Expr]) -> str:
    """The name of the fragment; copies of a loop are named by their factor."""
    siblings = {copy: weight for copy, weight in weights.items() if copy[0] == part.fragment}
    repeated = next((weight for weight in siblings.values() if weight.free_symbols), None)
    if repeated is not None and siblings[part.copy] != 1:
        return f"{part.fragment} x ({repeated})"
    return part.fragment if len(siblings) == 1 else f"{part.fragment} #{part.copy[1] + 1}"


def _after_passes(
    phase: PhaseGraph, inputs: Mapping[str, InputSpec], num_draft_tokens: int
) -> Iterator[CostRow]:
    """The whole graph after each ATen pass that changed it (earlier ones have no sizes)."""
    last: Cost | None = None
    for record in phase.records:
        if record.level != "aten" or record.after is None:
            continue
        known = {**_inputs_of(record.after), **inputs}
        costs = NodeCosts(record.after, known, num_draft_tokens)
        parts = [_CountedNode(node, cost) for node, cost in costs]
        weights = _weights_of_copies(parts, num_draft_tokens)
        total = sum((part.cost * weights[part.copy] for part in parts), Cost()).expanded()
        if total != last:
            yield CostRow(name=record.name, cost=total)
        last = total


def _inputs_of(graph: fx.Graph) -> dict[str, InputSpec]:
    """Placeholders that later passes removed: weights that were merged or packed."""
    roles = [str(node.meta.get("role")) for node in graph.find_nodes(op="placeholder")]
    return {role: InputSpec(name=role, kind="weight", sources=(role,)) for role in roles}


def _roofline_ms(cost: Cost, device: Device | None) -> float | None:
    """The longer of moving the bytes and doing the FLOPs."""
    if device is None:
        return None
    seconds = max(
        float(cost.num_bytes) / device.bytes_per_s, float(cost.flops) / device.flops_per_s
    )
    return seconds * 1e3


def readable(expr: Expr) -> Expr:
    """Terms collected by batch, then context, then drafts."""
    return sympy.collect(sympy.expand(expr), [B, T, R, C, K])


def _scaled(amount: int) -> str:
    """A number with three digits and a unit: 1.23M."""
    value = float(amount)
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 1000 or unit == "T":
            break
        value /= 1000
    return f"{value:.3g}{unit}"
