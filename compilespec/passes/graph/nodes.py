"""Graphs by their nodes: roles, outputs and inputs.

Nodes that later passes look for carry a role in their metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.program import BufferSpec, InputSpec


def find_role(gm: fx.GraphModule, role: str) -> fx.Node:
    """The node with the role.  Raises: PassError if no earlier pass named one."""
    for node in gm.graph.nodes:
        if node.meta.get("role") == role:
            return node
    known = sorted(
        {str(n.meta["role"]) for n in gm.graph.nodes if "role" in n.meta and n.op != "placeholder"}
    )
    raise PassError(f"no node plays the role {role!r}; roles so far: {', '.join(known) or 'none'}")


def give_role(gm: fx.GraphModule, role: str, node: fx.Node) -> None:
    """Let this node play the role, and no other."""
    for other in gm.graph.nodes:
        if other is not node and other.meta.get("role") == role:
            del other.meta["role"]
    node.meta["role"] = role


def has_role(gm: fx.GraphModule, role: str) -> bool:
    return any(node.meta.get("role") == role for node in gm.graph.nodes)


def output_node(gm: fx.GraphModule) -> fx.Node:
    return next(node for node in reversed(gm.graph.nodes) if node.op == "output")


def after_placeholders(gm: fx.GraphModule) -> fx.Node:
    """The first node that is not a placeholder; code that feeds the whole graph goes before it."""
    return next(node for node in gm.graph.nodes if node.op != "placeholder")


def set_outputs(gm: fx.GraphModule, outputs: Mapping[str, fx.Node]) -> None:
    """Make these the graph's outputs, with these names, in this order."""
    node = output_node(gm)
    node.args = (tuple(outputs.values()),)
    node.meta["names"] = tuple(outputs)


def get_outputs(gm: fx.GraphModule) -> dict[str, fx.Node]:
    node = output_node(gm)
    results: Any = node.args[0]
    return dict(zip(node.meta["names"], results, strict=True))


def copy_origin(source: fx.Node, target: fx.Node) -> None:
    """Module path and source line of `source` for a node that replaces it, without its author."""
    for key in ("stack_trace", "nn_module_stack"):
        if key in source.meta:
            target.meta[key] = source.meta[key]
    custom = source.meta.get("custom") or {}
    target.meta["custom"] = {key: value for key, value in custom.items() if key != "pass"}


# --- inputs ---


def add_input(gm: fx.GraphModule, ctx: PassContext, spec: InputSpec) -> fx.Node:
    """The placeholder fed by `spec`, made on first use."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.meta.get("role") == spec.name:
            return node
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        node = gm.graph.placeholder(re.sub(r"\W", "_", spec.name))
    node.meta["role"] = spec.name
    ctx.inputs[spec.name] = spec
    return node


def add_buffer(gm: fx.GraphModule, ctx: PassContext, buffer: BufferSpec) -> fx.Node:
    """The placeholder of a persistent buffer, declared on first use."""
    ctx.buffers.setdefault(buffer.name, buffer)
    return add_input(gm, ctx, InputSpec(name=buffer.name, kind=buffer.kind))


def add_weight(gm: fx.GraphModule, ctx: PassContext, name: str, tensor: Tensor) -> fx.Node:
    """The placeholder of a weight; a tensor that is already an input is shared, not fed twice."""
    place = _torch_compat.storage_place(tensor)
    for known, other in ctx.weights.items():
        if other is tensor or (
            _torch_compat.storage_place(other) == place
            and other.shape == tensor.shape
            and other.stride() == tensor.stride()
            and other.dtype == tensor.dtype
            and other.numel() > 0
        ):
            name = known
            break
    ctx.weights.setdefault(name, tensor)
    return add_input(gm, ctx, InputSpec(name=name, kind="weight", sources=(name,)))


# --- whole graphs ---


def snapshot(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with its nodes' metadata: cheap (no module, no tensors)."""
    copy = fx.Graph()
    result = copy.graph_copy(graph, {})
    output = copy.output(result)
    output.meta = dict(next(iter(reversed(graph.nodes))).meta)
    return copy


def stamp(graph: fx.Graph, name: str) -> None:
    """Record this pass as the author of nodes that have none."""
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if "pass" not in custom:
            node.meta["custom"] = {**custom, "pass": name}
