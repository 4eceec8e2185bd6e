"""Which nodes share storage on ATen, and which storages in-place operations write."""

from __future__ import annotations

import operator

from torch import fx

from compilespec import _torch_compat


def storage_root(node: fx.Node) -> fx.Node:
    """The node that made the storage that `node` views (`node` itself if it made its own)."""
    while node.op == "call_function" and node.args:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        if node.target is not operator.getitem and not _torch_compat.returns_alias(node.target):
            break
        node = source
    return node


def written_roots(graph: fx.Graph) -> set[fx.Node]:
    """Storages that any in-place operation writes."""
    return {root for node in graph.nodes for root in roots_written_by(node)}


def roots_written_by(node: fx.Node) -> list[fx.Node]:
    """Storages that this operation writes."""
    if node.op != "call_function":
        return []
    written = [node.args[place] for place in _torch_compat.mutated_arguments(node.target)]
    return [storage_root(part) for part in written if isinstance(part, fx.Node)]
