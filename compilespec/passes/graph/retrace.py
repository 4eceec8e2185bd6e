"""Where step graphs begin, and their one retrace to ATen."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from torch import fx

from compilespec import _torch_compat
from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.contracts import ARGUMENTS
from compilespec.passes.graph.fakes import fake_inputs
from compilespec.passes.graph.fragments import copy_fragment
from compilespec.passes.graph.nodes import (
    get_outputs,
    output_node,
    set_outputs,
    snapshot,
    stamp,
)
from compilespec.program import InputSpec, PassRecord


def start_step(ctx: PassContext) -> fx.GraphModule:
    """A graph of the target alone: its arguments (`input_ids`, `position_ids`, and those of
    `ARGUMENTS` that it has), weights as inputs, output `logits`.
    """
    gm = _torch_compat.graph_module(fx.Graph())
    arguments = {}
    for name in ARGUMENTS:
        if name in ARGUMENTS[2:] and name not in ctx.target.arguments:
            continue
        node = gm.graph.placeholder(name)
        node.meta["role"] = name
        arguments[name] = node
    gm.graph.output(())
    (logits,) = copy_fragment(gm, ctx, ctx.target, arguments)
    logits.meta["role"] = "logits"
    set_outputs(gm, {"logits": logits})
    stamp(gm.graph, "trace")
    gm.recompile()
    return gm


def start_replay() -> fx.GraphModule:
    """A graph of nothing: a replay runs the drafter alone, over inputs that steps of K = 0 kept."""
    gm = _torch_compat.graph_module(fx.Graph())
    gm.graph.output(())
    set_outputs(gm, {})
    return gm


def to_aten(
    gm: fx.GraphModule, ctx: PassContext, *, keep_graphs: bool = False
) -> tuple[fx.GraphModule, PassRecord]:
    """The one retrace: ATen, one fake mode, one symbol for every batch dimension, metadata
    everywhere.

    Raises: PassError if tracing needed a guard on a symbol: the graph would be wrong for some batch
    size.
    """
    started = time.perf_counter()
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    specs = [ctx.inputs[node.meta["role"]] for node in placeholders]
    mode = _torch_compat.fake_mode()
    fakes = fake_inputs(mode, gm, ctx)
    names = tuple(get_outputs(gm))
    aten = _torch_compat.retrace(gm, fakes, mode)
    _name_inputs(aten, specs)
    output_node(aten).meta["names"] = names
    guards = _torch_compat.free_guards(mode)
    if guards:
        raise PassError(
            f"to_aten ({ctx.phase}): the graph holds only where {'; '.join(guards)}; it must "
            "hold for all sizes"
        )
    for node in aten.graph.nodes:
        custom = node.meta.get("custom") or {}
        node.meta["custom"] = {"pass": "to_aten", **custom}
    aten.recompile()
    record = PassRecord(
        name="to_aten",
        level="aten",
        matches=1,
        nodes_before=len(gm.graph.nodes),
        nodes_after=len(aten.graph.nodes),
        elapsed_ms=(time.perf_counter() - started) * 1e3,
        numerics="exact",
        before=snapshot(gm.graph) if keep_graphs else None,
        after=snapshot(aten.graph) if keep_graphs else None,
    )
    return aten, record


def _name_inputs(aten: fx.GraphModule, specs: Sequence[InputSpec]) -> None:
    """Give the placeholders of a retraced graph their roles, and names after them."""
    for node, spec in zip(aten.graph.find_nodes(op="placeholder"), specs, strict=True):
        node.meta["role"] = spec.name
        _torch_compat.rename_placeholder(node, re.sub(r"\W", "_", spec.name))
