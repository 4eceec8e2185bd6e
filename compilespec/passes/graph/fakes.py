"""A spliced graph's inputs as fake tensors, and the shapes that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec._torch_compat import tree_flatten, tree_leaves
from compilespec.ops.quantized_linear import look_of_part
from compilespec.passes.context import PassContext
from compilespec.program import InputSpec

# Example sizes of the symbolic dimensions, chosen to equal few static ones.
EXAMPLE_SIZES = {"B": 7, "R": 7, "T": 13}


def fake_inputs(
    mode: Any, gm: fx.GraphModule, ctx: PassContext, sizes: dict[str, Any] | None = None
) -> list[Any]:
    """What feeds the placeholders, in order; a symbol for each batch dimension."""
    sizes = {} if sizes is None else sizes
    return [
        _fake_input(mode, ctx.inputs[node.meta["role"]], ctx, sizes)
        for node in gm.graph.find_nodes(op="placeholder")
    ]


class Shapes:
    """What operations have given on fakes; of several graphs with the same symbols."""

    def __init__(self) -> None:
        self.mode = _torch_compat.fake_mode()
        self.sizes: dict[str, Any] = {}
        self.known: dict[Any, Any] = {}


def node_values(
    gm: fx.GraphModule, ctx: PassContext, shapes: Shapes | None = None
) -> dict[fx.Node, Any]:
    """Every node's value on fakes: shapes and dtypes.  Torch IR.

    Args: shapes: of a graph that is much like this one.
    Raises: NodeError where an operator cannot take its inputs.
    """
    shapes = shapes or Shapes()
    run = _Values(gm, shapes.known)
    fakes = fake_inputs(shapes.mode, gm, ctx, shapes.sizes)
    with _torch_compat.running_fakes(shapes.mode):
        run.run(*fakes)
    return run.values


class _Values(fx.Interpreter):
    """An operation on values that look like those of an earlier one gives what that one gave:
    layers are alike.
    """

    def __init__(self, gm: fx.GraphModule, known: dict[Any, Any]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False
        self.values: dict[fx.Node, Any] = {}
        self._known = known

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._run(super().call_function, target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._run(super().call_method, target, args, kwargs)

    def _run(self, call: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, dict(kwargs)))
        looks = [_torch_compat.look_of(leaf) for leaf in leaves]
        is_real = any(isinstance(x, Tensor) and not _torch_compat.is_fake(x) for x in leaves)
        if is_real or None in looks:
            return call(target, args, kwargs)
        key = (call.__name__, target, str(form), *looks)
        if key not in self._known:
            result = call(target, args, kwargs)
            if any(value is leaf for value in tree_leaves(result) for leaf in leaves):
                return result  # it may have changed a value in place
            self._known[key] = result
        return self._known[key]

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


def fake_weight(mode: Any, spec: InputSpec, ctx: PassContext) -> Any:
    """A fake tensor for a weight of torch IR: itself, or a part of its GGUF blocks."""
    weight = ctx.weights[spec.sources[0]]
    if not spec.packed:
        return _torch_compat.fake_tensor(mode, weight)
    with mode:
        return look_of_part(spec.packed, weight)


def _fake_input(mode: Any, spec: InputSpec, ctx: PassContext, sizes: dict[str, Any]) -> Any:
    """A fake tensor for the input `spec`.  `sizes` keeps one symbol per batch dimension, which its
    inputs share.
    """
    device = ctx.config.device
    if spec.kind == "weight":
        return fake_weight(mode, spec, ctx)
    if spec.kind == "batch":
        dim = spec.name[-1]
        if dim not in sizes:
            example = torch.zeros(EXAMPLE_SIZES[dim], dtype=torch.int32, device=device)
            sizes[dim] = _torch_compat.fake_tensor(mode, example, dynamic_dims=(0,)).shape[0]
        with mode:
            return torch.empty((sizes[dim],), dtype=torch.int32, device=device)
    with mode:
        return ctx.buffers[spec.name].empty(device)
