"""Runs a list of passes over one graph: checks, times and records each."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.contracts import EVERYWHERE, Contract, broken, misdescribed, written_buffers
from compilespec.passes.graph.nodes import snapshot, stamp
from compilespec.passes.references import Reference
from compilespec.passes.splice.builder import Splice
from compilespec.program import PassRecord, module_path

Level = Literal["torch", "aten"]


PassFunction = Callable[[Splice], int]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One entry of the pipeline.

    `matches` gives the exact number of places the pass must change (None: not applicable to this
    context, so the pass is skipped); `at_least=0` instead is for optimisations, which may find
    nothing.
    """

    run: PassFunction
    after: tuple[str, ...] = ()
    numerics: Literal["exact", "rounding"] = "exact"
    matches: Callable[[PassContext], int | None] | None = None
    at_least: int | None = None
    looks_for: str = "places"  # what the pass matches, for messages
    near: tuple[str, ...] = ()  # words in the operators of near misses
    ensures: tuple[Contract, ...] = ()  # hold after this pass and after every later one
    reference: Reference | None = (
        None  # defines what the rewritten graph computes; None: the same as before
    )

    @property
    def name(self) -> str:
        return self.run.__name__


def check_order(passes: Sequence[Pass]) -> None:
    """Check that every `after` names an earlier pass and each pass says how often it matches."""
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

    Raises: PassError if a pass did not match as many places as it must, left a broken graph, or
    broke a contract of its stage.
    """
    records: list[PassRecord] = []
    step, ensured = Splice(gm, ctx), list(EVERYWHERE[level])
    before = snapshot(gm.graph) if keep_graphs else None
    ctx.declared.update(ctx.inputs)
    for entry in passes:
        expected = entry.matches(ctx) if entry.matches is not None else entry.at_least
        if expected is None or entry.name in disabled:
            continue
        ensured += entry.ensures
        record = _run(step, entry, expected, ensured, level, infer_shapes=keep_graphs)
        after = snapshot(gm.graph) if keep_graphs else None
        records.append(dataclasses.replace(record, before=before, after=after))
        before = after
    gm.recompile()
    return records


def _run(
    step: Splice,
    entry: Pass,
    expected: int,
    ensured: Sequence[Contract],
    level: Level,
    *,
    infer_shapes: bool,
) -> PassRecord:
    """Apply one pass, and check what it did.  Raises: PassError."""
    gm, ctx = step.gm, step.ctx
    num_nodes, written = len(gm.graph.nodes), written_buffers(gm.graph)
    started = time.perf_counter()
    matched = entry.run(step)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    ctx.declared.update(ctx.inputs)
    _check_count(entry, matched, expected, gm, ctx)
    stamp(gm.graph, entry.name)
    _lint(gm, entry)
    is_described = infer_shapes and level == "aten"
    check_contracts(gm, ctx, entry, ensured, written, infer_shapes=is_described)
    return PassRecord(
        name=entry.name,
        level=level,
        matches=matched,
        nodes_before=num_nodes,
        nodes_after=len(gm.graph.nodes),
        elapsed_ms=elapsed_ms,
        numerics=entry.numerics,
    )


def check_contracts(
    gm: fx.GraphModule,
    ctx: PassContext,
    entry: Pass,
    contracts: Sequence[Contract],
    written: Mapping[str, int],
    *,
    infer_shapes: bool = False,
) -> None:
    """Check what must hold after `entry`; `written` counts the writes of each buffer before it.

    Inferring shapes takes a tenth of the rewriting time, so they are checked only if graphs are
    kept for inspection.

    Raises: PassError.
    """
    problems = [f"{contract.says}, but {text}" for contract, text in broken(contracts, gm, ctx)]
    now = written_buffers(gm.graph)
    problems += [
        f"no pass may drop a write, but {name} has {now[name]} of {count}"
        for name, count in written.items()
        if now[name] < count
    ]
    if infer_shapes:
        problems += [f"shapes are re-inferred, but {t}" for t in misdescribed(gm.graph, entry.name)]
    if problems:
        raise PassError(
            f"pass {entry.name} ({ctx.phase}) broke its stage's contract: {'; '.join(problems[:3])}"
        )


def _check_count(
    entry: Pass, matched: int, expected: int, gm: fx.GraphModule, ctx: PassContext
) -> None:
    exact = entry.matches is not None
    if (exact and matched != expected) or (not exact and matched < expected):
        raise PassError(
            f"pass {entry.name} ({ctx.phase}): expected {'' if exact else 'at least '}{expected} "
            f"matches, found {matched}; it looked for {entry.looks_for}; the nearest candidates "
            f"are {_candidates(gm.graph, entry.near)}"
        )


def _candidates(graph: fx.Graph, near: Sequence[str], limit: int = 5) -> str:
    """Nodes whose operator has one of the words in its name, with module and source line."""
    found = [
        node
        for node in graph.nodes
        if node.op.startswith("call") and any(word in str(node.target) for word in near)
    ]
    names = [
        f"{node.name} ({module_path(node) or 'top'}"
        f"{', ' + line if (line := _source_line(node)) else ''})"
        for node in found[:limit]
    ]
    return ", ".join([*names, *(["..."] if len(found) > limit else [])]) or "none"


def _source_line(node: fx.Node) -> str:
    """The innermost line of the model's code, `file.py:12`."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""


def _lint(gm: fx.GraphModule, entry: Pass) -> None:
    try:
        gm.graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise PassError(f"pass {entry.name} left a broken graph: {error}") from error
