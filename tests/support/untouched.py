"""Graphs that a pass must leave alone, node for node."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx

from compilespec.errors import NotSupported, PassError
from compilespec.methods.registry import get_method
from compilespec.passes.context import PassContext
from compilespec.passes.graph.retrace import start_step
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES, run_passes
from compilespec.passes.splice.builder import Splice
from compilespec.program import Phase, Traced
from compilespec.tracing.target import trace_target
from tests.support.hand_graphs import HAND_CONFIG, code
from tests.support.models import tiny_target

PASSES = {entry.name: entry for entry in (*SPLICE_PASSES, *ATEN_PASSES)}
Case = tuple[fx.GraphModule, PassContext]


@functools.cache
def llama() -> Traced:
    return trace_target(tiny_target("llama", torch.float32, num_layers=2))


def step(phase: Phase, *done: str, target: Traced | None = None, **changes: Any) -> Case:
    """A step of a target alone, after the passes named."""
    fields: dict[str, Any] = {
        "phase": phase, "config": HAND_CONFIG, "draft": {}, "target": target or llama(),
        "capabilities": get_method("none").capabilities,
    }  # fmt: skip
    ctx = PassContext(**{**fields, **changes})
    gm = start_step(ctx)
    for name in done:
        run_passes(gm, ctx, (PASSES[name],), level="torch")
    return gm, ctx


def check_left_alone(name: str, case: Case, *, is_refused: bool = False) -> None:
    """The pass, where the runner would run it at all, changes nothing of the graph.

    Args:
        is_refused: with an error, not in silence.
    """
    gm, ctx = case
    before, roles = code(gm), _roles(gm)
    entry = PASSES[name]
    if is_refused:
        with pytest.raises((PassError, NotSupported)):
            entry.run(Splice(gm, ctx))
    elif entry.matches is None or entry.matches(ctx) is not None:
        entry.run(Splice(gm, ctx))
    assert code(gm) == before
    assert _roles(gm) == roles


def _roles(gm: fx.GraphModule) -> list[str]:
    return [str(node.meta.get("role")) for node in gm.graph.find_nodes(op="placeholder")]
