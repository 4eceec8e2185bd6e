"""Removes dead code and common subexpressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from compilespec import _torch_compat
from compilespec.passes.graph.aliases import roots_written_by, storage_root, written_roots
from compilespec.passes.splice.builder import Splice


def cleanup(step: Splice) -> int:
    """Remove dead code, including writes of temporaries that only dead code read, and common
    subexpressions; writes and reads of buffers are kept.

    Returns: nodes removed.  Numerics: exact.  Runs on ATen.
    """
    before = len(step.graph.nodes)
    seen: dict[Any, fx.Node] = {}
    written = written_roots(step.graph)
    for node in list(step.graph.nodes):
        if not _is_pure(node) or any(
            storage_root(part) in written for part in (node, *node.all_input_nodes)
        ):
            continue
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        known = seen.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            step.graph.erase_node(node)
    order = {node: place for place, node in enumerate(step.graph.nodes)}
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        sharing.setdefault(storage_root(node), []).append(node)
    for node in reversed(order):
        if not node.users and (_is_pure(node) or _is_lost(node, sharing, order)):
            step.graph.erase_node(node)
    drop_unused_inputs(step)
    return before - len(step.graph.nodes)


def _is_pure(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return not node.users
    if node.op != "call_function" or _torch_compat.is_mutable(node.target):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags


def _is_lost(
    node: fx.Node, sharing: Mapping[fx.Node, list[fx.Node]], order: Mapping[fx.Node, int]
) -> bool:
    """True where the node writes a temporary's storage that no later node reads."""
    roots = roots_written_by(node)
    return bool(roots) and all(
        root.op == "call_function"
        and all(order[user] <= order[node] for alias in sharing[root] for user in alias.users)
        for root in roots
    )


def _freeze(value: Any) -> Any:
    """A hashable form of node arguments that distinguishes 1, 1.0 and True."""
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(part) for part in value)
    if isinstance(value, dict):
        return tuple((key, _freeze(part)) for key, part in sorted(value.items()))
    return (
        (type(value), value)
        if isinstance(value, (int, float))
        else str(value)
        if isinstance(value, slice)
        else value
    )


def drop_unused_inputs(step: Splice) -> None:
    """Remove weights that only dead code read; batch inputs stay, because callers pass them."""
    for node in list(step.graph.nodes):
        if (
            node.op == "placeholder"
            and not node.users
            and step.ctx.inputs[node.meta["role"]].kind == "weight"
        ):
            del step.ctx.inputs[node.meta["role"]]
            step.graph.erase_node(node)
