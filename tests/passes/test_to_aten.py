"""The one retrace: it changes no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from compilespec import _torch_compat
from compilespec.passes.contracts import form
from compilespec.passes.graph.retrace import to_aten
from tests.support.steps import assert_same, random_inputs, run, started, targets


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_copied_operations_are_what_tracing_each_gives(parts, phase, monkeypatch):
    """Sizes may be made once where they were made often; the rest, in order, is the same."""
    gm, ctx = started(parts, phase, "commit_state")
    copied = _tensor_rows(to_aten(gm, ctx)[0])
    monkeypatch.setattr(_torch_compat, "_Retracing", fx.Interpreter)
    traced = _tensor_rows(to_aten(gm, ctx)[0])
    assert len(copied) > 200
    assert copied == traced


def _tensor_rows(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Nodes that make tensors: operator, arguments by place (sizes by value), shape and origin."""
    place: dict[fx.Node, Any] = {}
    rows: list[tuple[Any, ...]] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            place[node] = str(value.node.expr)
            continue
        place[node] = len(rows)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: place[n])
        rows.append((str(node.target), str(arguments), form(value), str(node.meta["custom"])))
    return rows


@pytest.mark.parametrize("seed", range(2))
def test_the_retrace_changes_no_number(rewritten, seed):
    inputs = random_inputs(rewritten.ctx, seed)
    assert_same(
        run(rewritten.aten, rewritten.ctx, inputs), run(rewritten.spliced, rewritten.ctx, inputs)
    )
    assert all(isinstance(t, torch._ops.OpOverload) or "getitem" in str(t) or "built-in" in str(t)
               for t in targets(rewritten.aten))  # fmt: skip
