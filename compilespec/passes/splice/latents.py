"""Latent attention: proves that a layer's keys and values are one product of a latent.

    key   = [part of latent @ weight.T, by head | what all heads share], in either order
    value = another part of the same product

What a cache must hold of such a token is the latent and the shared part.  The proof walks back from
the attention marker over operations that keep a token's numbers together; the product treats each
token by itself, so what the latent is made of does not matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.passes.contracts import writes
from compilespec.passes.splice.expansion import Expansion
from compilespec.program import module_path
from compilespec.tracing.structure import LINEAR, argument, shape_of

WeightOf = Callable[[fx.Node], Tensor | None]  # the plain weight that a node is, or None


class NoProof(Exception):
    """Why a layer that looks like latent attention cannot be cached as latents."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The nodes of a proved layer."""

    expansion: Expansion
    latent: fx.Node  # [B, T, rank] or [B, 1, T, rank]
    weight: fx.Node
    dtype: torch.dtype
    shared: tuple[fx.Node, ...]  # [B, 1, T, size] each
    nodes: tuple[fx.Node, ...]  # what made keys and values of them; nothing else may be left of it


def find_latent(marker: fx.Node, weight_of: WeightOf) -> Latent | None:
    """The proof for one layer; None if it is no latent attention.

    Raises: NoProof if keys and values are parts of one product, but something else is missing.
    """
    query, key, value = marker.args[:3]
    if not isinstance(key, fx.Node) or not isinstance(value, fx.Node):
        return None
    values = _columns(value)
    parts = [_Part.of(*part) for part in _parts(key)]
    mine = [part for part in parts if part.columns is not None]
    if values is None or values.product not in {p.columns.product for p in mine if p.columns}:
        return None
    if values.product in _sources(query):  # queries, keys and values in one: not latents
        return None
    return _prove(marker, values, parts, weight_of)


def _prove(marker: fx.Node, values: _Columns, parts: list[_Part], weight_of: WeightOf) -> Latent:
    mine = [part.columns for part in parts if part.columns is not None]
    shared = [part for part in parts if part.columns is None]
    if len(mine) != 1 or any(part.one_head is None for part in shared):
        raise NoProof("its keys are more than a part of the product and what all heads share")
    latent, weight, bias = _linear(values.product)
    if bias is not None:
        raise NoProof("the product that keys and values are made of has a bias")
    tensor = weight_of(weight)
    if tensor is None or tensor.dtype != _dtype(latent):
        raise NoProof("the weight of keys and values is quantized, adapted or computed")
    query_shape, shape = shape_of(marker.args[0]), shape_of(latent)
    if query_shape is None or query_shape[1] != values.num_heads:
        raise NoProof("several query heads share a key")
    if shape is None or shape not in ((None, None, shape[-1]), (None, 1, None, shape[-1])):
        raise NoProof("the latent has dimensions beside its tokens")
    expansion = Expansion(
        weight=str(weight.meta.get("role")),
        num_heads=values.num_heads,
        width=values.width,
        rank=int(tensor.shape[1]),
        key=mine[0].range,
        value=values.range,
        parts=tuple((part.end - part.begin, part.columns is not None) for part in parts),
    )
    if 2 * expansion.num_cached > expansion.num_expanded:
        raise NoProof(
            f"its latents have {expansion.num_cached} numbers a token, keys and values "
            f"{expansion.num_expanded}"
        )
    nodes = [*values.nodes, *(node for part in parts for node in part.nodes)]
    _check_writes(marker, nodes)
    return Latent(
        expansion=expansion,
        latent=latent,
        weight=weight,
        dtype=tensor.dtype,
        shared=tuple(part.one_head for part in shared if part.one_head),
        nodes=tuple(nodes),
    )


def _check_writes(marker: fx.Node, nodes: list[fx.Node]) -> None:
    """Nothing in the layer may be written in place but the keys that are put together there."""
    module = module_path(marker)
    for node, root in writes(marker.graph):
        if node not in nodes and root is not marker and module_path(node).startswith(module):
            raise NoProof(f"{node.name} writes in place")


def _linear(node: fx.Node) -> tuple[fx.Node, fx.Node, Any]:
    """Input, weight and bias of a product."""
    source: Any = node.args[0]
    return source, argument(node, 1, "weight"), argument(node, 2, "bias")


def _dtype(node: fx.Node) -> torch.dtype | None:
    if "example" in node.meta:
        dtype: torch.dtype = node.meta["example"][1]
        return dtype
    return getattr(node.meta.get("example_value"), "dtype", None)


def _sources(node: Any, depth: int = 24) -> set[fx.Node]:
    """What a node is made of, some steps back."""
    seen: set[fx.Node] = set()
    frontier = [node] if isinstance(node, fx.Node) else []
    for _ in range(depth):
        frontier = [s for n in frontier for s in n.all_input_nodes if s not in seen]
        seen.update(frontier)
    return seen


# --- the product's columns that a tensor [B, N, T, h] holds ---


@dataclass(frozen=True, kw_only=True)
class _Columns:
    product: fx.Node  # [.., num_heads * width]
    num_heads: int
    width: int
    range: tuple[int, int]  # of a head's columns
    nodes: tuple[fx.Node, ...]  # from the tensor to the product


def _columns(node: fx.Node) -> _Columns | None:
    """Walk back over slices of the last dimension, the exchange of heads and tokens, and the view
    that tells heads apart.  Views keep the tokens in order.
    """
    shape = shape_of(node)
    if shape is None or len(shape) != 4 or not isinstance(shape[3], int):
        return None
    begin, end, is_by_head = 0, shape[3], True
    nodes: list[fx.Node] = []
    while len(nodes) < 12:
        nodes.append(node)
        sliced = _last_slice(node)
        if sliced is not None:
            node, first, *between = sliced
            nodes += between
            begin, end = begin + first, end + first
            continue
        source: Any = node.args[0] if node.args else None
        if _swaps_heads(node):
            is_by_head = not is_by_head
        elif node.target in _VIEWS and not is_by_head:
            return _split_heads(node, source, (begin, end), nodes)
        elif node.target != "contiguous":
            return None
        if not isinstance(source, fx.Node):
            return None
        node = source
    return None


def _split_heads(
    node: fx.Node, product: fx.Node, columns: tuple[int, int], nodes: list[fx.Node]
) -> _Columns | None:
    """The columns, if the view `node` tells the heads of a product apart."""
    heads, whole = shape_of(node), shape_of(product)
    if heads is None or whole is None or len(heads) != 4 or product.target not in LINEAR:
        return None
    count, width = heads[2:]
    if count is None or width is None or whole[-1] != count * width:
        return None
    return _Columns(
        product=product,
        num_heads=count,
        width=width,
        range=columns,
        nodes=(*nodes, product),
    )


def _last_slice(node: fx.Node) -> tuple[Any, ...] | None:
    """(source, first column, nodes between) of a slice of the last dimension."""
    if node.target is not operator.getitem:
        return None
    source, index = node.args
    if not isinstance(source, fx.Node):
        return None
    if isinstance(index, int):
        return _part_of_split(source, index)
    shape = shape_of(source)
    first = None if shape is None else _first_column(index, len(shape))
    return None if first is None else (source, first)


def _part_of_split(split: fx.Node, index: int) -> tuple[Any, ...] | None:
    source: Any = split.args[0]
    shape = shape_of(source)
    if split.target not in _SPLITS or shape is None or not isinstance(shape[-1], int):
        return None
    sizes, dim = argument(split, 1, "split_size_or_sections"), argument(split, 2, "dim", 0)
    if dim % len(shape) != len(shape) - 1:
        return None
    if isinstance(sizes, int):
        sizes = [sizes] * -(-shape[-1] // sizes)
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(s, int) for s in sizes):
        return None
    return source, sum(sizes[: index % len(sizes)]), split


def _first_column(index: Any, rank: int) -> int | None:
    """The start of an index that slices the last dimension and keeps the others whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    if items.count(Ellipsis) == 1 and len(items) <= rank + 1:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank + 1 - len(items))
    if len(items) != rank or not all(isinstance(item, slice) for item in items):
        return None
    if any(item != slice(None) and item != slice(None, None, 1) for item in items[:-1]):
        return None
    last = items[-1]
    start = 0 if last.start is None else last.start
    return start if isinstance(start, int) and start >= 0 and last.step in (None, 1) else None


def _swaps_heads(node: fx.Node) -> bool:
    """True where it exchanges dimensions 1 and 2 of four."""
    dims = [d for d in node.args[1:] if not isinstance(d, (list, tuple))]
    dims += [d for given in node.args[1:] if isinstance(given, (list, tuple)) for d in given]
    if not all(isinstance(dim, int) for dim in dims):
        return False
    if node.target in ("transpose", torch.transpose):
        return {dim % 4 for dim in dims} == {1, 2}  # type: ignore[operator]
    return node.target in ("permute", torch.permute) and [d % 4 for d in dims] == [0, 2, 1, 3]  # type: ignore[operator]


# --- the parts of a key ---


@dataclass(frozen=True, kw_only=True)
class _Part:
    begin: int
    end: int
    columns: _Columns | None
    one_head: fx.Node | None  # what all heads share, [B, 1, T, end - begin]
    nodes: tuple[fx.Node, ...]

    @classmethod
    def of(cls, begin: int, end: int, node: fx.Node, own: tuple[fx.Node, ...]) -> _Part:
        columns = _columns(node)
        one_head = None if columns is not None else _one_head(node)
        found = () if columns is None else columns.nodes
        expand = (node,) if one_head is not None and one_head is not node else ()
        return cls(
            begin=begin,
            end=end,
            columns=columns,
            one_head=one_head,
            nodes=(*own, *expand, *found),
        )


def _parts(key: fx.Node) -> Iterator[tuple[int, int, fx.Node, tuple[fx.Node, ...]]]:
    """(begin, end, tensor, nodes that put it there) over the last dimension of a key, in order;
    nothing if that is not known.
    """
    shape = shape_of(key)
    if shape is None or len(shape) != 4 or not isinstance(shape[3], int):
        return
    if key.target in (torch.cat, torch.concat):
        tensors: Any = key.args[0]
        begin = 0
        for tensor in tensors if argument(key, 1, "dim", 0) in (-1, 3) else ():
            size = (shape_of(tensor) or (None,))[-1]
            if size is None:
                return
            yield begin, begin + size, tensor, (key,)
            begin += size
    elif key.target in ("new_empty", "new_zeros", torch.empty, torch.zeros):
        yield from _written_parts(key, shape[3])
    else:
        yield 0, shape[3], key, ()


def _written_parts(
    key: fx.Node, key_dim: int
) -> Iterator[tuple[int, int, fx.Node, tuple[fx.Node, ...]]]:
    """Parts of a key that is allocated and then written slice by slice."""
    found, end = [], 0
    for user in key.users:
        target: Any = user
        if user.target is operator.getitem and len(user.users) == 1:
            (target,) = user.users
        index = user.args[1] if len(user.args) > 1 else None
        if user.target is operator.setitem:
            value = user.args[2]
        elif target.target == "copy_" and target.args[0] is user and not target.users:
            value = target.args[1]
        else:
            continue  # a reader, as the marker is
        begin = _first_column(index, 4)
        size = (shape_of(value) or (None,))[-1]
        if begin is None or size is None or not isinstance(value, fx.Node):
            return
        found.append((begin, begin + size, value, tuple(dict.fromkeys((target, user, key)))))
    found.sort(key=lambda part: part[0])
    for begin, stop, _, _ in found:
        if begin != end:
            return
        end = stop
    if end == key_dim and len(key.users) == len(found) + 1:  # and the marker
        yield from found


def _one_head(node: fx.Node) -> fx.Node | None:
    """What a tensor repeats for all heads, [B, 1, T, h]."""
    source: Any = node
    if node.target in ("expand", "expand_as", "broadcast_to", torch.broadcast_to):
        source = node.args[0]
    shape = shape_of(source)
    return source if shape is not None and shape[:3] == (None, 1, None) else None


_VIEWS = ("view", "reshape", torch.reshape, "unflatten")
_SPLITS = ("split", torch.split)
