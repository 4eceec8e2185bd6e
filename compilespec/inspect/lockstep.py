"""Compares the ranks' steps, together, with the step of one process."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.errors import PassError, RankLost
from compilespec.inspect.interpret import Decisions, Stage
from compilespec.inspect.random_inputs import random_cases
from compilespec.inspect.stages import context_of, with_graphs
from compilespec.ops.collectives.group import Group, ThreadGroup, acting
from compilespec.passes.context import PassContext
from compilespec.passes.references import Case
from compilespec.passes.splice.shard_weights import whole_buffers
from compilespec.passes.splice.sharding.plan import Cut
from compilespec.program import PhaseGraph, SpecProgram, module_path

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 2e-2}
BATCH = 2


def check_lockstep(
    program: SpecProgram,
    group: Group | None = None,
    tell: Callable[[str], Sequence[str]] | None = None,
) -> None:
    """Run one step of each phase on random inputs, whole and by ranks, and compare node by node.

    Args:
        group: the ranks, of which this process is one; None: threads of this process try all.
        tell: exchanges this rank's finding for all findings, in rank order.
    Raises: PassError, on every rank, that names the first node that differs.
    """
    for phase in ("prefill", "decode"):
        graph = with_graphs(program.graphs[phase])
        found = _compare(graph, program, group)
        answers = tell(found) if tell is not None else [found]
        for answer in filter(None, answers):
            raise PassError(f"the ranks' {phase} step is not that of one process: {answer}")


def _compare(phase: PhaseGraph, program: SpecProgram, group: Group | None) -> str:
    """The first difference in words; "" where there is none."""
    ctx = context_of(phase)
    sharding = ctx.sharding
    assert sharding is not None
    record = next(r for r in phase.splice_records if r.name == "shard_weights")
    assert record.before is not None
    whole_ctx = dataclasses.replace(ctx, buffers=whole_buffers(ctx), sharding=None)
    first = phase.splice_records[0].before
    assert first is not None
    start = Stage(first, phase.spliced, whole_ctx, ctx.declared, {})
    (case,) = random_cases(
        whole_ctx, program.config.vocab_size, start, batch_sizes=[BATCH], plain=True
    )
    whole = Stage(record.before, phase.spliced, whole_ctx, ctx.declared, {})
    decided = Decisions()
    expected = whole(case.inputs, decisions=decided).nodes
    after = phase.spliced.graph
    if group is not None:
        return _compare_rank(after, phase, ctx, case, expected, decided, group)
    return _compare_threads(after, phase, ctx, case, expected, decided)


def _compare_threads(
    after: fx.Graph,
    phase: PhaseGraph,
    ctx: PassContext,
    case: Case,
    expected: Mapping[str, Any],
    decided: Decisions,
) -> str:
    sharding = ctx.sharding
    assert sharding is not None
    found: list[str] = [""] * sharding.size

    def run(group: ThreadGroup) -> None:
        try:
            pieces = {**ctx.weights, **sharding.pieces(group.rank)}
            own = dataclasses.replace(ctx, weights=pieces)
            found[group.rank] = _compare_rank(after, phase, own, case, expected, decided, group)
        except Exception as error:
            found[group.rank] = f"rank {group.rank}: {error}"
            group.leave()

    threads = [
        threading.Thread(target=run, args=(group,)) for group in ThreadGroup.make(sharding.size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next(filter(None, found), "")


def _compare_rank(
    after: fx.Graph,
    phase: PhaseGraph,
    ctx: PassContext,
    case: Case,
    expected: Mapping[str, Any],
    decided: Decisions,
    group: Group,
) -> str:
    stage = Stage(after, phase.spliced, ctx, ctx.declared, {})
    inputs = {name: _own(tensor, ctx, name, group) for name, tensor in case.inputs.items()}
    followed = Decisions(followed=iter(decided.winners), bound=BOUNDS[ctx.config.dtype])
    try:
        with acting(group):
            values = stage(inputs, decisions=followed).nodes
    except RankLost:
        raise
    except Exception as error:
        return f"rank {group.rank}: {error}"
    for node in after.nodes:
        name, cut = node.meta.get("stands_for", (None, None))
        if name in expected and node.name in values:
            why = _difference(expected[name], values[node.name], cut, ctx, group)
            if why:
                return f"{node.name} ({module_path(node) or 'top'}), rank {group.rank}: {why}"
    return ""


def _own(tensor: Tensor, ctx: PassContext, name: str, group: Group) -> Tensor:
    assert ctx.sharding is not None
    cut = ctx.sharding.caches.get(name)
    return tensor if cut is None else cut.piece(tensor, group.rank, group.size)


def _difference(whole: Any, own: Any, cut: Cut | None, ctx: PassContext, group: Group) -> str:
    """The difference of a rank's value from its part of the whole one; "" where it is equal."""
    if not isinstance(whole, Tensor) or not isinstance(own, Tensor):
        return ""
    wanted = whole if cut is None else cut.piece(whole, group.rank, group.size)
    if wanted.shape != own.shape:
        return f"its shape is {list(own.shape)}, expected {list(wanted.shape)}"
    if not wanted.is_floating_point():
        differing = int((wanted != own).sum())
        return f"{differing} of {own.numel()} numbers differ" if differing else ""
    bound = max(BOUNDS[ctx.config.dtype], BOUNDS.get(own.dtype, 0.0) if _is_narrow(own) else 0.0)
    scale = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max()) if wanted.numel() else 0.0
    is_close = torch.isclose(own, wanted, rtol=bound, atol=bound * max(scale, 1.0), equal_nan=True)
    if bool(is_close.all()):
        return ""
    gap = float((own - wanted).nan_to_num(0.0).abs().max())
    return f"off by {gap:.2g}, where {bound * max(scale, 1.0):.2g} is rounding"


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
