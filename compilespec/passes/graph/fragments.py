"""Copies captured graphs into a step."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.graph.nodes import add_weight, output_node
from compilespec.program import Traced
from compilespec.tracing.quantized_weights import is_quantized, rebuild, take_apart


def copy_fragment(
    gm: fx.GraphModule,
    ctx: PassContext,
    fragment: Traced,
    arguments: Mapping[str, fx.Node],
    *,
    before: fx.Node | None = None,
) -> tuple[fx.Node, ...]:
    """Copy a captured graph into `gm`, node by node; returns the nodes of its outputs.

    Weights become (shared) inputs, size symbols become `sym_size` of the argument that carries
    them.  Fake tensors of the capture are dropped: those of different captures must not mix.
    """
    anchor = before if before is not None else output_node(gm)
    env = _bind_inputs(gm, ctx, fragment, arguments, anchor)
    ordinal = _num_copies(gm.graph, fragment.name)  # a draft loop splices a fragment repeatedly
    source = fragment.graph_module
    with gm.graph.inserting_before(anchor):
        for node in source.graph.nodes:
            if node.op == "get_attr":
                env[node] = _copy_attribute(gm, source, str(node.target), fragment.name)
            elif node.op not in ("placeholder", "output"):
                env[node] = gm.graph.node_copy(node, env.__getitem__)
                env[node].meta = _meta_of_copy(node, fragment.name, ordinal)
    results: Any = output_node(source).args[0]
    return tuple(env[result] for result in results)


def _bind_inputs(
    gm: fx.GraphModule,
    ctx: PassContext,
    fragment: Traced,
    arguments: Mapping[str, fx.Node],
    anchor: fx.Node,
) -> dict[fx.Node, Any]:
    """The node in `gm` for each placeholder of a fragment; new nodes go before `anchor`."""
    env: dict[fx.Node, Any] = {}
    symbols: list[fx.Node] = []
    placeholders = fragment.graph_module.graph.find_nodes(op="placeholder")
    for node, entry in zip(placeholders, fragment.inputs, strict=True):
        if entry.kind == "argument":
            env[node] = arguments[entry.name]
        elif entry.kind == "weight":
            env[node] = _bind_weight(gm, ctx, entry.name, fragment.weights[entry.name], anchor)
        elif node.users:
            symbols.append(node)
    with gm.graph.inserting_before(anchor):
        for node in symbols:
            env[node] = _bind_symbol(gm.graph, node, fragment, env)
    return env


def _meta_of_copy(node: fx.Node, fragment: str, ordinal: int) -> dict[str, Any]:
    """A node's metadata, with its fake tensor replaced by shape and dtype."""
    meta = {key: value for key, value in node.meta.items() if key not in ("example_value", "val")}
    meta["custom"] = {**node.meta["custom"], "fragment": fragment, "copy": ordinal}
    example = node.meta.get("example_value")
    if isinstance(example, Tensor):
        shape = tuple(size if isinstance(size, int) else None for size in example.shape)
        meta["example"] = (shape, example.dtype)
    return meta


def _num_copies(graph: fx.Graph, fragment: str) -> int:
    """The number of copies of a fragment in the graph."""
    made = (node.meta.get("custom") or {} for node in graph.nodes)
    return 1 + max((c.get("copy", 0) for c in made if c.get("fragment") == fragment), default=-1)


def _bind_weight(
    gm: fx.GraphModule, ctx: PassContext, name: str, tensor: Tensor, anchor: fx.Node
) -> fx.Node:
    """The input of a weight; a quantized one has an input per part, and a node rebuilds it."""
    if not is_quantized(tensor):
        return add_weight(gm, ctx, name, tensor)
    key, parts = take_apart(tensor)
    inputs = [add_weight(gm, ctx, f"{name}.{part}", value) for part, value in parts.items()]
    with gm.graph.inserting_before(anchor):
        node = gm.graph.call_function(rebuild, (key, *inputs))
    node.meta["example"] = (tuple(tensor.shape), tensor.dtype)
    return node


def _bind_symbol(
    graph: fx.Graph, symbol: fx.Node, fragment: Traced, env: Mapping[fx.Node, Any]
) -> fx.Node:
    """A fragment's size symbol is a dimension of one of its arguments: read it there."""
    value = symbol.meta["example_value"]
    placeholders = fragment.graph_module.graph.find_nodes(op="placeholder")
    for node, entry in zip(placeholders, fragment.inputs, strict=True):
        if entry.kind != "argument":
            continue
        for dim, size in enumerate(node.meta["example_value"].shape):
            if not isinstance(size, int) and str(size) == str(value):
                return graph.call_function(torch.ops.aten.sym_size.int, (env[node], dim))
    raise PassError(f"{fragment.name}: no argument carries the size symbol {value}")


def _copy_attribute(
    gm: fx.GraphModule, source: fx.GraphModule, target: str, prefix: str
) -> fx.Node:
    """Copy a fragment's tensor constants into the graph under unique names."""
    value = operator.attrgetter(target)(source)
    if not isinstance(value, Tensor):
        raise PassError(
            f"{prefix}: the graph calls a nested graph {target}, which cannot be spliced"
        )
    name = f"{prefix}.{target}".replace(".", "_")
    if not hasattr(gm, name):
        gm.register_buffer(name, value.detach(), persistent=False)
    return gm.graph.get_attr(name)
