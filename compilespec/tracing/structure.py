"""Finds the head, embedding and decoder layers in the graph of any causal LM."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilespec._torch_compat import functions_of_nn
from compilespec.program import MIXERS, marker_kind, module_path

LINEAR = (torch.nn.functional.linear, functions_of_nn.linear)
EMBEDDING = (torch.nn.functional.embedding, torch.embedding)
# Element-wise operations that models apply to logits: soft caps, scales, casts.
_ROWWISE_FUNCTIONS = (
    operator.mul,
    operator.truediv,
    operator.add,
    operator.sub,
    torch.mul,
    torch.div,
    torch.add,
    torch.tanh,
)
_ROWWISE_METHODS = ("float", "to", "mul", "div", "add", "tanh", "type", "contiguous")


@dataclass(frozen=True, kw_only=True)
class Head:
    """The product that turns hidden states into logits."""

    node: fx.Node
    hidden: fx.Node  # its input [.., D], after the final norm
    weight: fx.Node  # [V, D]
    rowwise: bool  # true: every operation between product and logits treats each row by itself


def shape_of(node: object) -> tuple[int | None, ...] | None:
    """A node's shape, with None for symbolic sizes; None if it is not a tensor."""
    if not isinstance(node, fx.Node):
        return None
    if "example" in node.meta:
        shape: tuple[int | None, ...] = node.meta["example"][0]
        return shape
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def is_float(node: fx.Node) -> bool:
    if "example" in node.meta:
        return bool(node.meta["example"][1].is_floating_point)
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.is_floating_point()


def find_head(logits: fx.Node) -> Head | None:
    """Walk back from the logits over element-wise operations to the head's product, or None."""
    node, rowwise = logits, True
    for _ in range(32):
        if node.op == "call_function" and node.target in LINEAR:
            hidden, weight = node.args[0], node.args[1]
            if isinstance(hidden, fx.Node) and isinstance(weight, fx.Node):
                return Head(node=node, hidden=hidden, weight=weight, rowwise=rowwise)
            return None
        tensors = [
            arg for arg in node.args if isinstance(arg, fx.Node) and shape_of(arg) is not None
        ]
        known = (node.op == "call_function" and node.target in _ROWWISE_FUNCTIONS) or (
            node.op == "call_method" and node.target in _ROWWISE_METHODS
        )
        rowwise = rowwise and known and len(tensors) == 1 and shape_of(tensors[0]) == shape_of(node)
        if not tensors:
            return None
        node = tensors[0]
    return None


def head_of(graph: fx.Graph) -> Head | None:
    """The head of a captured model, whose first output are logits."""
    results: Any = graph.output_node().args[0]
    return find_head(results[0])


def token_ids(graph: fx.Graph) -> fx.Node:
    """The placeholder of the token ids, [B, T]."""
    return next(node for node in graph.nodes if node.meta.get("role") == "input_ids")


def find_embedding(input_ids: fx.Node) -> fx.Node | None:
    """The weight of the first embedding that reads the token ids."""
    frontier = [input_ids]
    for _ in range(8):
        users = [user for node in frontier for user in node.users]
        for user in users:
            if user.op == "call_function" and user.target in EMBEDDING:
                tensors = [arg for arg in user.args if isinstance(arg, fx.Node)]
                weights = [t for t in tensors if len(shape_of(t) or ()) == 2 and is_float(t)]
                if weights:
                    return weights[0]
        frontier = [user for user in users if _is_ids(user, input_ids)]
    return None


def _is_ids(node: fx.Node, input_ids: fx.Node) -> bool:
    """True for token ids in another shape or dtype, or with some of them replaced."""
    if node.op == "call_method" or node.target is operator.getitem:
        return True
    chooses = node.target in (torch.where, torch.masked_fill)
    return chooses and shape_of(node) == shape_of(input_ids) and not is_float(node)


_TO_OTHER_IDS = (operator.eq, operator.ne, operator.or_, operator.and_, torch.where)


def id_readers(ids: fx.Node) -> list[fx.Node]:
    """The nodes that read the values of token ids, through casts, views and other ids in the
    place of some.
    """
    found: list[fx.Node] = []
    for user in ids.users:
        is_other_ids = user.target in _TO_OTHER_IDS and not is_float(user)
        if user.op == "call_method" or user.target is operator.getitem or is_other_ids:
            is_size = user.target in ("size", "dim", "numel")
            found += [] if is_size else id_readers(user)
        elif user.target not in (torch.ops.aten.sym_size.int, getattr):
            found.append(user)
    return list(dict.fromkeys(found))


def layer_prefix(graph: fx.Graph) -> str | None:
    """The module list that holds the decoder layers, such as `model.layers`: the prefix of every
    marker's path before the layer index.
    """
    prefixes = {
        re.split(r"\.\d+(?:\.|$)", module_path(node), maxsplit=1)[0]
        for node in graph.nodes
        if marker_kind(node) in MIXERS
    }
    if len(prefixes) != 1:
        return None
    prefix = prefixes.pop()
    indices = [layer_of(node, prefix) for node in graph.nodes if marker_kind(node) in MIXERS]
    return prefix if None not in indices else None


def num_decoder_layers(graph: fx.Graph) -> int:
    """The number of layers in the module list of `layer_prefix`; without one, of attention
    layers.
    """
    prefix = layer_prefix(graph)
    if prefix is None:
        return sum(marker_kind(node) == "attention" for node in graph.nodes)
    return 1 + max(layer for node in graph.nodes if (layer := layer_of(node, prefix)) is not None)


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """The argument of the node's call for a parameter, by position or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def layer_of(node: fx.Node, prefix: str) -> int | None:
    """Index of the decoder layer that made the node; None outside the layers."""
    match = re.match(re.escape(prefix) + r"\.(\d+)(?:\.|$)", module_path(node)) if prefix else None
    if match is None and not prefix:
        match = re.match(r"(\d+)(?:\.|$)", module_path(node))
    return int(match[1]) if match else None


def ancestors(node: fx.Node) -> set[fx.Node]:
    """The node itself and all nodes that it is computed from; nodes of sizes are leaves."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            is_size = isinstance(one.meta.get("example_value"), torch.SymInt)
            todo += [] if is_size else one.all_input_nodes
    return found


def walk_back(start: fx.Node, is_inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes that `start` is computed from, itself among them, up to the first outside."""
    found, todo = set[fx.Node](), [start]
    while todo:
        node = todo.pop()
        if node not in found and is_inside(node):
            found.add(node)
            todo += node.all_input_nodes
    return found


def descendants(node: fx.Node) -> set[fx.Node]:
    """Every node that depends on `node`."""
    seen: set[fx.Node] = set()
    frontier = [node]
    while frontier:
        for user in frontier.pop().users:
            if user not in seen:
                seen.add(user)
                frontier.append(user)
    return seen


def residual_streams(
    graph: fx.Graph, input_ids: fx.Node, hidden_size: int
) -> dict[int, list[fx.Node]]:
    """Candidates for hs[k], the residual stream that enters layer k (k = n: leaves the last layer,
    before the norm).

    hs[k] is the float node of width `hidden_size` that layer k-1 makes and a later place reads;
    hs[0] is made before the layers.  Features of images that are added behind a layer belong to
    it.  Every model family examined so far has exactly one candidate each.
    """
    prefix = layer_prefix(graph)
    if prefix is None:
        return {}
    streams: dict[int, list[fx.Node]] = {}
    dependent = descendants(input_ids)
    for node in graph.nodes:
        shape = shape_of(node)
        if (
            node not in dependent
            or not shape
            or len(shape) != 3
            or shape[-1] != hidden_size
            or not is_float(node)
        ):
            continue
        is_deep = marker_kind(node) == "deep_rows"
        made_in = layer_of(node.all_input_nodes[0] if is_deep else node, prefix)
        readers = [user for user in node.users if marker_kind(user) != "deep_rows"]
        read_in = {layer_of(user, prefix) for user in readers}
        if made_in is None and 0 in read_in:
            streams.setdefault(0, []).append(node)
        elif made_in is not None and read_in - {made_in}:
            streams.setdefault(made_in + 1, []).append(node)
    return streams


def describe(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(f"{node.name} ({module_path(node) or 'top'})" for node in nodes) or "none"
