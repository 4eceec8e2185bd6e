"""Skips the computation of rows that nothing reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from compilespec._torch_compat import functions_of_nn
from compilespec.passes.contracts import writes
from compilespec.passes.graph.aliases import storage_root
from compilespec.passes.graph.nodes import copy_origin
from compilespec.passes.splice.add_adapters import adapted
from compilespec.passes.splice.builder import Splice, node_of
from compilespec.passes.splice.rows import Rows, take_rows
from compilespec.tracing import structure as analysis
from compilespec.tracing.structure import EMBEDDING, LINEAR, argument

Shape = tuple[int | None, ...]
Reads = list[fx.Node]  # the inputs of which each row of a node reads the same row
ROW = 1  # the dimension of rows: [B, S, ..] or, packed, [1, T, ..]


def narrow_rows(step: Splice) -> int:
    """Move each choice of rows (`take_rows`) up through rowwise operations to where rows are mixed:
    to just after the last layer's attention, if only the head reads the rows of the drafter or, in
    prefill, of the target.

    Returns: products that now have fewer rows.  Numerics: rounding.  Torch IR.
    """
    choices: dict[Rows, list[fx.Node]] = {}
    for node in step.graph.nodes:
        if "rows" in node.meta:
            choices.setdefault(node.meta["rows"], []).append(node)
    return sum(_Narrowing(step, rows, exits).run() for rows, exits in choices.items())


class _Narrowing:
    """One choice of rows, and the nodes that take them (`exits`)."""

    def __init__(self, step: Splice, rows: Rows, exits: list[fx.Node]) -> None:
        self.step, self.rows, self.exits = step, rows, exits
        self.written = {root for _, root in writes(step.graph)}

    def run(self) -> int:
        """Compute nodes that only the exits read for the chosen rows; returns their products."""
        region = self._find_region()
        products = sum(node.target in LINEAR for node in region)
        if not products:
            return 0
        graph, env = self.step.graph, self._copy(region)
        for node in self.exits:
            narrow = env[_source(node)]
            if "role" in node.meta:
                narrow.meta["role"] = node.meta["role"]
            node.replace_all_uses_with(narrow)
        for node in (*self.exits, *region):
            graph.erase_node(node)
        return products

    def _copy(self, region: dict[fx.Node, Reads]) -> dict[fx.Node, fx.Node]:
        """Each node of the region, and each that it reads, for the chosen rows alone."""
        step = self.step
        env: dict[fx.Node, fx.Node] = {}
        with step.before(self.exits[0]):
            num_rows = self._num_rows()
            for node, reads in reversed(region.items()):
                for source in reads:
                    if source not in env:
                        env[source] = node_of(take_rows(step, step.value(source), self.rows))
                with step.graph.inserting_before(step.cursor):
                    env[node] = step.graph.node_copy(node, lambda old: env.get(old, old))
                copy_origin(node, env[node])
                self._resize(env[node], num_rows)
        return env

    def _resize(self, node: fx.Node, num_rows: fx.Node | int) -> None:
        """A copy's shape, and the sizes it reshapes to."""
        if "example" in node.meta:
            shape, dtype = node.meta["example"]
            size = num_rows if isinstance(num_rows, int) else None
            node.meta["example"] = ((*shape[:ROW], size, *shape[ROW + 1 :]), dtype)
        if node.target in _RESHAPES:
            sizes = list(_sizes(node))
            sizes[ROW] = -1 if sizes[ROW] == -1 else num_rows
            node.args = (node.args[0], tuple(sizes))

    def _find_region(self) -> dict[fx.Node, Reads]:
        """The rowwise nodes that only the exits and each other read, last node first."""
        outside: set[fx.Node] = set()
        while True:
            region = self._region_without(outside)
            # a part has its rows taken where others read other parts of the same tensor
            torn = {n for n in region if n.target is operator.getitem} - outside
            torn = {n for n in torn if self._is_tuple(_source(n)) and _source(n) not in region}
            if not torn:
                return region
            outside |= torn

    def _is_tuple(self, node: fx.Node) -> bool:
        return self._shape(node) is None and node.target in _PARTS

    def _region_without(self, outside: set[fx.Node]) -> dict[fx.Node, Reads]:
        exits, wanted = set(self.exits), {_source(node) for node in self.exits}
        region: dict[fx.Node, Reads] = {}
        for node in reversed(self.step.graph.nodes):
            if node in outside or node not in wanted:
                continue
            if all(user in exits or user in region for user in node.users):
                reads = self._reads(node)
                if reads is not None:
                    region[node] = reads
                    wanted |= set(reads)
        return region

    def _reads(self, node: fx.Node) -> Reads | None:
        """The rule of the node's operation; None if it has none or the rule does not apply."""
        rule = _RULES.get(node.target) if node.op in ("call_function", "call_method") else None
        shape = self._shape(node)
        if rule is None or "role" in node.meta or (shape is not None and shape[ROW] == 1):
            return None
        reads = rule(node, self._shape)
        return None if reads is None or not all(map(self._has_rows, reads)) else reads

    def _has_rows(self, source: fx.Node) -> bool:
        """True where the rows can also be taken of `source`, later: not if it is written in place,
        nor if the index has one entry per request and requests share `source`.
        """
        shape = self._shape(source)
        if shape is None:  # the rows are taken of the parts, or of what was divided
            return self._is_tuple(source)
        is_batch = self.rows.is_packed or self.rows.index is None or shape[0] is None
        return is_batch and len(shape) > ROW and storage_root(source) not in self.written

    def _shape(self, node: fx.Node) -> Shape | None:
        if node.op == "placeholder":
            weight = self.step.ctx.weights.get(str(node.meta.get("role")))
            return None if weight is None else tuple(weight.shape)
        if node.op == "get_attr":
            return tuple(getattr(self.step.gm, str(node.target)).shape)
        return analysis.shape_of(node)

    def _num_rows(self) -> fx.Node | int:
        if not self.rows.is_packed or self.rows.index is None:
            return 1
        count: Any = self.step.value(self.rows.index).shape[0]
        return node_of(count)


def _source(taken: fx.Node) -> fx.Node:
    source = taken.args[0]
    assert isinstance(source, fx.Node)
    return source


# --- how operations read rows: one rule each ---

ShapeOf = Callable[[fx.Node], Shape | None]
Rule = Callable[[fx.Node, ShapeOf], Reads | None]


def _elementwise(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """Elementwise operations read the same row of every operand that has rows."""
    shape, reads = shape_of(node), []
    for source in node.all_input_nodes:
        other = shape_of(source)
        if shape is None or other is None:
            return None
        dim = ROW - (len(shape) - len(other))
        if dim >= 0 and other[dim] != 1:
            if dim != ROW:
                return None
            reads.append(source)
    return reads


def _first(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """Products read the row of their first operand."""
    source, shape = node.args[0], shape_of(node)
    is_inner = shape is not None and len(shape) > ROW + 1
    return [source] if is_inner and isinstance(source, fx.Node) else None


def _over_last(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """A softmax or reduction over the last dimension reads the row of its first operand."""
    shape, over = shape_of(node), argument(node, 1, "dim")
    over = over if isinstance(over, (list, tuple)) else (over,)
    keeps = node.target not in _REDUCTIONS or argument(node, 2, "keepdim")
    if shape is None or not keeps or any(dim not in (-1, len(shape) - 1) for dim in over):
        return None
    return _first(node, shape_of)


def _normalisation(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    over = argument(node, 1, "normalized_shape")
    is_last = isinstance(over, (list, tuple)) and len(over) == 1
    return _first(node, shape_of) if is_last else None


def _reshape(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """Reshapes that keep the request and row dimensions."""
    (source, before), after = _first_shape(node, shape_of), shape_of(node)
    if before is None or after is None or len(_sizes(node)) != len(after):
        return None
    stays = len(before) > ROW + 1 and before[: ROW + 1] == after[: ROW + 1]
    return [source] if stays else None


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    given: Any = node.args[1:]
    return tuple(given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given)


def _parts(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """Splits along another dimension."""
    source, shape = _first_shape(node, shape_of)
    return [source] if shape is not None and _is_along_other(node, 2, len(shape)) else None


def _cat(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    shape, parts = shape_of(node), node.args[0]
    if shape is None or not isinstance(parts, (list, tuple)):
        return None
    return [*parts] if _is_along_other(node, 1, len(shape)) else None


def _is_along_other(node: fx.Node, place: int, rank: int) -> bool:
    dim = argument(node, place, "dim", 0)
    return isinstance(dim, int) and dim % rank != ROW


def _item(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """A part, or slices that keep all requests and rows."""
    index: Any = node.args[1]
    source, shape = _first_shape(node, shape_of)
    if isinstance(index, int):
        return [source] if source.target in _PARTS else None
    if shape is None or not isinstance(index, tuple):
        return None
    slices = [item for item in index if item is not Ellipsis]
    if not all(isinstance(item, slice) for item in slices):
        return None
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    slices[at:at] = [slice(None)] * (len(shape) - len(slices))
    is_whole = all(
        (item.start or 0, item.stop, item.step or 1) == (0, None, 1) for item in slices[: ROW + 1]
    )
    return [source] if is_whole else None


def _alias(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """`x.view_as(x)`, which captures use to keep their outputs distinct."""
    return _elementwise(node, shape_of) if node.args[0] is node.args[1] else None


def _adapted(node: fx.Node, shape_of: ShapeOf) -> Reads | None:
    """A product, what it is of, and which adapter's numbers count."""
    reads: Any = node.args[:3]
    return None if any(shape_of(source) is None for source in reads) else [*reads]


def _first_shape(node: fx.Node, shape_of: ShapeOf) -> tuple[fx.Node, Shape | None]:
    source: Any = node.args[0]
    return source, shape_of(source) if isinstance(source, fx.Node) else None


_REDUCTIONS = ("mean", torch.mean, "sum", torch.sum)
_RESHAPES = ("view", "reshape", torch.reshape)
_PARTS = ("chunk", torch.chunk, "split", torch.split)
ELEMENTWISE = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow,
    torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.pow, torch.square,
    torch.sqrt, torch.rsqrt, torch.exp, torch.tanh, torch.sigmoid, torch.relu,
    functional.relu, functional.silu, functional.gelu, functional.sigmoid,
    functional.tanh, functional.softplus, functional.dropout,
    functions_of_nn.gelu, functions_of_nn.silu,
    "add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "tanh",
    "sigmoid", "relu", "to", "float", "type", "bfloat16", "half", "double", "contiguous",
    "clone",
)  # fmt: skip
_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((*LINEAR, *EMBEDDING, torch.ops.compilespec.head_linear.default), _first),
    **dict.fromkeys((*_REDUCTIONS, functional.softmax, torch.softmax, "softmax"), _over_last),
    **dict.fromkeys((functional.rms_norm, torch.rms_norm, functional.layer_norm), _normalisation),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_PARTS, _parts),
    torch.cat: _cat,
    adapted: _adapted,
    operator.getitem: _item,
    "view_as": _alias,
}  # fmt: skip
