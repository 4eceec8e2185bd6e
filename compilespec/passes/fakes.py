"""A spliced graph's inputs as fake tensors, and the shapes that follow from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compilespec import _torch_compat
from compilespec.passes.context import PassContext
from compilespec.program import InputSpec

# Example sizes of the symbolic dimensions, chosen to equal few static ones.
EXAMPLE_SIZES = {"B": 7, "R": 7, "T": 13}


def fake_inputs(mode: Any, gm: fx.GraphModule, ctx: PassContext) -> list[Any]:
    """What feeds the placeholders, in order; a symbol for each batch dimension."""
    sizes: dict[str, Any] = {}
    return [
        _fake_input(mode, ctx.inputs[node.meta["role"]], ctx, sizes)
        for node in gm.graph.find_nodes(op="placeholder")
    ]


def node_values(gm: fx.GraphModule, ctx: PassContext) -> dict[fx.Node, Any]:
    """Every node's value on fakes: shapes and dtypes.  Torch IR.

    Raises: what an operator raises that cannot take its inputs; `_Values.last` names its node.
    """
    mode = _torch_compat.fake_mode()
    run = _Values(gm)
    fakes = fake_inputs(mode, gm, ctx)
    with _torch_compat.running_fakes(mode):
        run.run(*fakes)
    return run.values


class _Values(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        try:
            self.values[n] = super().run_node(n)
        except Exception as error:
            raise NodeError(n, str(error).splitlines()[0]) from error
        return self.values[n]


class NodeError(Exception):
    """A node that cannot take what its inputs are."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{node.name}: {why}")
        self.node, self.why = node, why


def _fake_input(mode: Any, spec: InputSpec, ctx: PassContext, sizes: dict[str, Any]) -> Any:
    """A fake tensor for the input `spec`.  `sizes` keeps one symbol per batch dimension, which its
    inputs share.
    """
    device = ctx.config.device
    if spec.kind == "weight":
        return _torch_compat.fake_tensor(mode, ctx.weights[spec.name])
    if spec.kind == "batch":
        dim = spec.name[-1]
        if dim not in sizes:
            example = torch.zeros(EXAMPLE_SIZES[dim], dtype=torch.int32, device=device)
            sizes[dim] = _torch_compat.fake_tensor(mode, example, dynamic_dims=(0,)).shape[0]
        with mode:
            return torch.empty((sizes[dim],), dtype=torch.int32, device=device)
    buffer = ctx.buffers[spec.name]
    with mode:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
