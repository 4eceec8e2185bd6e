"""Runs a list of passes over one graph: checks, times and records each.  It knows no pass by
name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, fx

from compilespec.errors import PassError
from compilespec.methods.base import Capabilities
from compilespec.program import BufferSpec, InputSpec, PassRecord, Phase, ProgramConfig, Traced

Level = Literal["torch", "aten"]


@dataclass(kw_only=True)
class PassContext:
    """What passes read, and the inputs and buffers they declare.  One context per phase graph."""

    phase: Phase
    config: ProgramConfig
    capabilities: Capabilities
    target: Traced
    draft: Mapping[str, Traced]  # the drafter's captured calls: "combine", "forward", "propose"
    aux_layers: tuple[int, ...] = ()
    prepack: bool = True
    weights: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, InputSpec] = field(default_factory=dict)  # by placeholder name
    buffers: dict[str, BufferSpec] = field(default_factory=dict)

    @property
    def num_attention_layers(self) -> int:
        return self.target.num_attention_layers

    @property
    def has_drafter(self) -> bool:
        return self.capabilities.own_kv_cache


PassFunction = Callable[[fx.GraphModule, PassContext], int]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One entry of the pipeline.

    `matches` gives the exact number of places the pass must change (None: not applicable to this
    context,
    so the pass is skipped); `at_least=0` instead is for optimisations, which may find nothing.
    """

    run: PassFunction
    after: tuple[str, ...] = ()
    numerics: Literal["exact", "rounding"] = "exact"
    matches: Callable[[PassContext], int | None] | None = None
    at_least: int | None = None

    @property
    def name(self) -> str:
        return self.run.__name__


def check_order(passes: Sequence[Pass]) -> None:
    """Every `after` must name an earlier pass of the list; a pass states how many matches it must
    have.
    """
    seen: set[str] = set()
    for entry in passes:
        missing = [name for name in entry.after if name not in seen]
        assert not missing, (
            f"pass {entry.name} must come after {missing}, which do not come before it"
        )
        assert (entry.matches is None) != (entry.at_least is None), (
            f"pass {entry.name} needs matches or at_least"
        )
        seen.add(entry.name)


def run_passes(
    gm: fx.GraphModule,
    ctx: PassContext,
    passes: Sequence[Pass],
    *,
    level: Level,
    disabled: frozenset[str] = frozenset(),
    keep_graphs: bool = False,
) -> list[PassRecord]:
    """Apply `passes` in order, in place.

    Raises: PassError when a pass matched another number of places than it must, or left a broken
    graph.
    """
    records: list[PassRecord] = []
    before = snapshot(gm.graph) if keep_graphs else None
    for entry in passes:
        expected = entry.matches(ctx) if entry.matches is not None else entry.at_least
        if expected is None or entry.name in disabled:
            continue
        num_nodes = len(gm.graph.nodes)
        started = time.perf_counter()
        matched = entry.run(gm, ctx)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        _check_count(entry, matched, expected, ctx)
        _stamp(gm.graph, entry.name)
        _lint(gm, entry)
        after = snapshot(gm.graph) if keep_graphs else None
        records.append(
            PassRecord(
                name=entry.name,
                level=level,
                matches=matched,
                nodes_before=num_nodes,
                nodes_after=len(gm.graph.nodes),
                elapsed_ms=elapsed_ms,
                numerics=entry.numerics,
                before=before,
                after=after,
            )
        )
        before = after
    return records


def snapshot(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with its nodes' metadata: cheap (no module, no tensors)."""
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return copy


def _check_count(entry: Pass, matched: int, expected: int, ctx: PassContext) -> None:
    exact = entry.matches is not None
    if (exact and matched != expected) or (not exact and matched < expected):
        raise PassError(
            f"pass {entry.name} ({ctx.phase}): expected {'' if exact else 'at least '}{expected} "
            f"matches, found "
            f"{matched}; the target's graph has a form this pass does not know"
        )


def _stamp(graph: fx.Graph, name: str) -> None:
    """Nodes without an author were made by this pass."""
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if "pass" not in custom:
            node.meta["custom"] = {**custom, "pass": name}


def _lint(gm: fx.GraphModule, entry: Pass) -> None:
    try:
        gm.graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise PassError(f"pass {entry.name} left a broken graph: {error}") from error
    gm.recompile()
