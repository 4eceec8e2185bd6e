"""Operations that only move numbers: where a cut dimension is afterwards."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from compilespec._torch_compat import OpOverload
from compilespec.passes.splice.sharding.flow import Flow, Placed, Refused, Shard, ints


def op_name(node: fx.Node) -> str:
    """A function's or method's name, "compilespec::name" of an operator of ours."""
    if node.op == "call_method":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        name = node.target._schema.name
        return name.removeprefix("aten::")
    return str(getattr(node.target, "__name__", node.target))


def dim_argument(node: fx.Node, place: int) -> Any:
    """The argument `dim`, by name or place."""
    if "dim" in node.kwargs:
        return node.kwargs["dim"]
    return node.args[place] if len(node.args) > place else None


def _turned(rule: Callable[[Flow, fx.Node, int], list[int | None]]) -> Any:
    """A rule of an operation that says of which dimension of its input each of its own is."""

    def placed(flow: Flow, node: fx.Node) -> Placed:
        x = node.args[0]
        if not isinstance(x, fx.Node) or not isinstance(flow.values.get(x), Tensor):
            return None
        shard, root = flow.of(x, node), flow.roots.get(x)
        if shard is None and root is None:
            return None
        dims = rule(flow, node, len(flow.shape(x)))
        if root is not None:
            flow.roots[node] = (root[0], tuple(None if d is None else root[1][d] for d in dims))
        if shard is None:
            return None
        if shard.cut.dim not in dims:
            raise Refused(f"{op_name(node)} loses the dimension that is cut", x)
        return shard.at(dims.index(shard.cut.dim))

    return placed


def _transpose(flow: Flow, node: fx.Node, ndim: int) -> list[int | None]:
    first, second = (int(str(d)) % ndim for d in node.args[1:3])
    dims: list[int | None] = list(range(ndim))
    dims[first], dims[second] = second, first
    return dims


def _matrix_transpose(flow: Flow, node: fx.Node, ndim: int) -> list[int | None]:
    return [*range(ndim - 2), ndim - 1, ndim - 2]


def _permute(flow: Flow, node: fx.Node, ndim: int) -> list[int | None]:
    order: Any = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    return [int(d) % ndim for d in order]


def _unsqueeze(flow: Flow, node: fx.Node, ndim: int) -> list[int | None]:
    dims: list[int | None] = list(range(ndim))
    dims.insert(int(str(dim_argument(node, 1))) % (ndim + 1), None)
    return dims


def _squeeze(flow: Flow, node: fx.Node, ndim: int) -> list[int | None]:
    gone = int(str(dim_argument(node, 1))) % ndim
    return [d for d in range(ndim) if d != gone]


def _same(flow: Flow, node: fx.Node, ndim: int) -> list[int | None]:
    return list(range(ndim))


def view_as(flow: Flow, node: fx.Node) -> Placed:
    """Of a value as itself, which captures end with."""
    if node.args[0] is node.args[1]:
        placed: Placed = _turned(_same)(flow, node)
        return placed
    if any(flow.of(x, node) for x in node.all_input_nodes):
        raise Refused("view_as of another value", *node.all_input_nodes)
    return None


def expand(flow: Flow, node: fx.Node) -> Placed:
    """A cut dimension keeps its size, or -1."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    shard = flow.of(x, node)
    if shard is None:
        return None
    dim = shard.cut.dim + len(flow.shape(node)) - len(flow.shape(x))
    _resize(flow, node, dim, shard)
    return shard.at(dim)


def reshape(flow: Flow, node: fx.Node) -> Placed:
    """The cut dimension is split, its first part is cut then, or merged, if it comes first."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    shard, root = flow.of(x, node), flow.roots.get(x)
    sizes, result = flow.shape(x), flow.shape(node)
    if root is not None:
        ends: list[int | None] = [None] * len(result)
        for dim, of_weight in enumerate(root[1]):
            place = _place_after(sizes, result, dim)
            if place is not None:
                ends[place] = of_weight
        flow.roots[node] = (root[0], tuple(ends))
    if shard is None:
        return None
    place = _place_after(sizes, result, shard.cut.dim)
    if place is None:
        raise Refused(f"{op_name(node)} mixes the dimension that is cut with others", x)
    return _reshaped(flow, node, x, shard, place)


def _place_after(sizes: Sequence[Any], result: Sequence[Any], dim: int) -> int | None:
    """Where the first part of a dimension is after a reshape; None where it is mixed."""
    if not all(isinstance(size, int) for size in sizes[dim:]):
        return None
    wanted, reached = math.prod(sizes[dim:]), 1
    for place in reversed(range(len(result))):
        if not isinstance(result[place], int):
            break
        reached *= result[place]
        if reached == wanted and result[place] > 1:
            return place
    return None


def _reshaped(flow: Flow, node: fx.Node, x: fx.Node, shard: Shard, place: int) -> Shard:
    length = flow.shape(node)[place]
    if length != flow.shape(x)[shard.cut.dim] and (shard.cut.segments or shard.cut.length):
        raise Refused(f"{op_name(node)} of several cut stretches", x)
    if length % shard.cut.parts:
        raise Refused(
            f"{length} cannot be cut into {shard.cut.parts} equal parts",
            x,
            parts=math.gcd(length, shard.cut.parts),
        )
    _resize(flow, node, place, shard)
    return shard.at(place)


def _resize(flow: Flow, node: fx.Node, dim: int, shard: Shard) -> None:
    """Give a rank's size where an argument says the whole one."""
    if op_name(node) == "flatten":
        return
    given: Any = node.args[1]
    if isinstance(given, fx.Node) and given.target is torch.Size:
        given = given.args[0]
    nested = isinstance(given, tuple | list)
    sizes: Any = given if nested else node.args[1:]
    if (dim, -1) in ints(sizes) or not isinstance(sizes[dim], int):
        return
    own = list(sizes)
    own[dim] = -(-int(flow.shape(node)[dim]) // shard.cut.parts)

    def edit() -> None:
        node.args = (node.args[0], tuple(own)) if nested else (node.args[0], *own)

    flow.edits[node] = edit


def concatenated(flow: Flow, node: fx.Node) -> Placed:
    """Along another dimension, of values that are all cut alike."""
    operands: Any = node.args[0]
    found = [flow.of(x, node) for x in operands]
    cut = [s for s in found if s is not None]
    if not cut:
        return None
    ndim = len(flow.shape(node))
    dim = int(str(dim_argument(node, 1) or 0)) % ndim
    places = {(s.cut.dim, s.cut.parts, s.cut.segments) for s in cut}
    if len(places) > 1 or cut[0].cut.dim == dim:
        raise Refused("cat along the dimension that is cut, or cut in different ways", *operands)
    places_of_whole = [place for place, s in enumerate(found) if s is None]
    if places_of_whole and cut[0].cut.segments:
        raise Refused("cat with a value that is whole", *operands)
    if places_of_whole:
        flow.edits[node] = lambda: _take_own(flow, node, places_of_whole, cut[0])
    return cut[0].at(cut[0].cut.dim, *cut[1:])


def _take_own(flow: Flow, node: fx.Node, places: Sequence[int], shard: Shard) -> None:
    """Of operands that are whole, each rank takes its piece."""
    operands: Any = node.args[0]
    parts = list(operands)
    for place in places:
        with flow.gm.graph.inserting_before(node):
            parts[place] = flow.gm.graph.call_function(
                torch.ops.compilespec.take_shard.default,
                (parts[place], shard.cut.dim, shard.cut.parts, flow.sharding.size),
            )
    node.args = (tuple(parts), *node.args[1:])


def split(flow: Flow, node: fx.Node) -> Placed:
    """`chunk` and `split`: pieces of another dimension, or stretches of the one that is cut."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    shard = flow.of(x, node)
    if shard is None:
        return None
    results: Any = flow.values[node]
    ndim = len(flow.shape(x))
    if int(str(dim_argument(node, 2) or 0)) % ndim != shard.cut.dim:
        return (shard,) * len(results)
    lengths = tuple(int(result.shape[shard.cut.dim]) for result in results)
    _check_stretches(flow, node, x, shard, lengths)
    if op_name(node) != "chunk":
        own = [length // shard.cut.parts for length in lengths]
        flow.edits[node] = lambda: _set_sizes(node, own)
    return (Shard(replace(shard.cut, segments=()), shard.origins),) * len(results)


def _set_sizes(node: fx.Node, sizes: list[int]) -> None:
    if len(node.args) > 1:
        node.args = (node.args[0], sizes, *node.args[2:])
        return
    name = next(key for key in node.kwargs if key.startswith("split_size"))
    node.kwargs = {**node.kwargs, name: sizes}


def _check_stretches(
    flow: Flow, node: fx.Node, x: fx.Node, shard: Shard, lengths: tuple[int, ...]
) -> None:
    if shard.cut.segments == lengths:
        return
    fits = not shard.cut.length and all(length % shard.cut.parts == 0 for length in lengths)
    raise Refused(
        f"{op_name(node)} along the dimension that is cut", x, segments=lengths if fits else ()
    )


def getitem(flow: Flow, node: fx.Node) -> Placed:
    """Of a tuple its entry; of a tensor, dimensions that stay whole, and stretches."""
    x, index = node.args[:2]
    assert isinstance(x, fx.Node)
    placed = flow.placed.get(x)
    if isinstance(placed, tuple):
        assert isinstance(index, int)
        return placed[index]
    if not isinstance(flow.values.get(x), Tensor):
        return None
    shard, root = flow.of(x, node), flow.roots.get(x)
    if shard is None and root is None:
        return None
    entries = index_entries(index, len(flow.shape(x)), flow)
    dims = [dim for dim, _ in entries if dim != GONE]
    if root is not None:
        ends = [None if d is None or e is not ALL else root[1][d] for d, e in entries if d != GONE]
        flow.roots[node] = (root[0], tuple(ends))
    if shard is None:
        return None
    entry = next((e for dim, e in entries if dim == shard.cut.dim), None)
    if entry is None:
        raise Refused("an index into the dimension that is cut", x)
    place = dims.index(shard.cut.dim)
    if entry is ALL:
        return shard.at(place)
    return _stretch(flow, node, x, shard, entry).at(place)


ALL = slice(None)
GONE = -1


def index_entries(index: object, ndim: int, flow: Flow) -> list[tuple[int | None, Any]]:
    """Of each dimension of x[index], that of x and what is taken of it; (GONE, _) is one that x
    loses, (None, _) a new one.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    used = sum(entry is not None and entry is not Ellipsis for entry in given)
    if Ellipsis not in [entry for entry in given if not isinstance(entry, fx.Node)]:
        given.append(Ellipsis)
    entries: list[tuple[int | None, Any]] = []
    dim = 0
    for entry in given:
        if entry is None:
            entries.append((None, ALL))
        elif entry is Ellipsis:
            entries += [(dim + offset, ALL) for offset in range(ndim - used)]
            dim += ndim - used
        elif isinstance(entry, slice):
            is_all = entry == ALL or (entry.start in (0, None) and entry.stop is None)
            is_all = is_all and entry.step in (1, None)
            entries.append((dim, ALL if is_all else entry))
            dim += 1
        else:
            value = flow.values.get(entry) if isinstance(entry, fx.Node) else None
            width = value.dim() if isinstance(value, Tensor) else 0
            entries += [(None, ALL)] * width or [(GONE, None)]
            dim += 1
    return entries


def _stretch(flow: Flow, node: fx.Node, x: fx.Node, shard: Shard, entry: slice) -> Shard:
    """Every n-th number, or one of the stretches that are cut each by itself."""
    length, parts = int(flow.shape(x)[shard.cut.dim]), shard.cut.parts
    own = length // parts
    step = entry.step or 1
    plain = Shard(replace(shard.cut, segments=()), shard.origins)
    if step != 1:
        if entry.stop is None and (entry.start or 0) < step and own % step == 0:
            return plain
        raise Refused("a slice of the dimension that is cut", x)
    if not all(isinstance(end, int | None) for end in (entry.start, entry.stop)):
        raise Refused("a slice of the dimension that is cut", x)
    first, last, _ = entry.indices(length)
    lengths = stretches(x, shard.cut.dim, length, flow)
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    if first not in bounds or last not in bounds or not lengths:
        raise Refused("a slice of the dimension that is cut", x)
    _check_stretches(flow, node, x, shard, lengths)
    flow.edits[node] = lambda: _set_slice(node, entry, slice(first // parts, last // parts))
    many = lengths[bounds.index(first) : bounds.index(last)]
    return plain if len(many) == 1 else Shard(replace(shard.cut, segments=many), shard.origins)


def stretches(x: fx.Node, dim: int, length: int, flow: Flow) -> tuple[int, ...]:
    """The lengths between all ends of slices that are taken of a dimension."""
    ends = {0, length}
    for user in x.users:
        if user.target is not operator.getitem:
            continue
        for place, entry in index_entries(user.args[1], len(flow.shape(x)), flow):
            if place == dim and isinstance(entry, slice):
                if not all(isinstance(end, int | None) for end in (entry.start, entry.stop)):
                    return ()
                ends.update(entry.indices(length)[:2])
    bounds = sorted(ends)
    return tuple(high - low for low, high in itertools.pairwise(bounds))


def _set_slice(node: fx.Node, old: slice, new: slice) -> None:
    index = node.args[1]
    if isinstance(index, tuple):
        entries = tuple(new if isinstance(e, slice) and e == old else e for e in index)
        node.args = (node.args[0], entries)
    else:
        node.args = (node.args[0], new)


RULES: Mapping[str, Callable[[Flow, fx.Node], Placed]] = {
    "transpose": _turned(_transpose),
    "swapaxes": _turned(_transpose),
    "permute": _turned(_permute),
    "t": _turned(_matrix_transpose),
    "unsqueeze": _turned(_unsqueeze),
    "squeeze": _turned(_squeeze),
    "contiguous": _turned(_same),
    "to": _turned(_same),
    "clone": _turned(_same),
    "view_as": view_as,
    "expand": expand,
    "view": reshape,
    "reshape": reshape,
    "flatten": reshape,
    "cat": concatenated,
    "concat": concatenated,
    "chunk": split,
    "split": split,
    "getitem": getitem,
}
