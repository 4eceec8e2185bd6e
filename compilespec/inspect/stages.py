"""The stages of a phase's graph, each before and after one pass, ready to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from compilespec.inspect.interpret import Stage
from compilespec.passes.context import PassContext
from compilespec.passes.order import ATEN_PASSES, REPLAY_PASSES, SPLICE_PASSES, rewrite_phase
from compilespec.passes.references import Reference
from compilespec.program import PassRecord, PhaseGraph

REFERENCES: Mapping[str, Reference] = {
    entry.name: entry.reference
    for entry in (*SPLICE_PASSES, *REPLAY_PASSES, *ATEN_PASSES)
    if entry.reference is not None
}


@dataclass(frozen=True, kw_only=True)
class PassStages:
    """One pass of one phase: its graph before and after, and what it must compute."""

    record: PassRecord
    before: Stage
    after: Stage
    reference: Reference | None  # None: what the graph before computes


def context_of(graph: PhaseGraph) -> PassContext:
    """The context of a graph's passes: what they read and declared.  Other stages take what they
    need from fields of `SpecProgram` and `PhaseGraph`; this is the one way to it after the
    rewriting.
    """
    context: PassContext = graph.context
    return context


def pass_stages(phase: PhaseGraph) -> Iterator[PassStages]:
    """Every pass of a phase, in order; the retrace to ATen runs only when it is reached.

    Needs the passes' graphs: see `with_graphs`.
    """
    ctx = context_of(phase)
    bound: dict[str, Tensor] = {}
    for record in phase.splice_records:
        yield _stages(record, phase.spliced, phase.spliced, ctx, bound)
    owner = phase.spliced  # of the graph before the retrace
    for record in phase.step.records:
        yield _stages(record, owner, phase.graph_module, ctx, bound)
        owner = phase.graph_module


def with_graphs(phase: PhaseGraph) -> PhaseGraph:
    """The phase with each pass's graph kept: rewritten once more, from the same captures, where it
    was built without.
    """
    if all(record.before is not None for record in phase.splice_records):
        return phase
    known = {entry.name for entry in (*SPLICE_PASSES, *REPLAY_PASSES, *ATEN_PASSES)}
    ran = {record.name for record in phase.records}
    ctx = dataclasses.replace(context_of(phase), inputs={}, buffers={}, weights={}, declared={})
    return rewrite_phase(ctx, keep_graphs=True, disabled=frozenset(known - ran))


def _stages(
    record: PassRecord,
    owner_before: fx.GraphModule,
    owner_after: fx.GraphModule,
    ctx: PassContext,
    bound: dict[str, Tensor],
) -> PassStages:
    assert record.before is not None
    assert record.after is not None
    return PassStages(
        record=record,
        before=Stage(record.before, owner_before, ctx, ctx.declared, bound),
        after=Stage(record.after, owner_after, ctx, ctx.declared, bound),
        reference=REFERENCES.get(record.name),
    )
