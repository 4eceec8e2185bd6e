"""Cuts a step at attention and recurrences: pieces of one structure are compiled once.

The operators at the cuts run by themselves between the pieces, which is also where piecewise CUDA
graphs end and begin.  Only tensors whose every size is a number or one symbol cross a cut.  Inside
a piece, sizes are read from them again, and views are made again.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import compilespec.ops  # noqa: F401  (registers the operators)
from compilespec import _torch_compat
from compilespec._torch_compat import OpOverload
from compilespec.errors import PassError
from compilespec.lowering.constants import constants_in
from compilespec.lowering.stitching import OpStep, PieceStep, Step, StitchPlan
from compilespec.ops.device import traits_of

CUTS = (
    torch.ops.compilespec.paged_attention.default,
    torch.ops.compilespec.cached_recurrence.default,
)
# A piece that writes the accepted path of a tree would take all the layers' caches as inputs.  In
# one C++ call these writes cost less one after the other; on CUDA they stay in the graph of a
# piece.
CPU_CUTS = (torch.ops.compilespec.write_cache.default,)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One structure: a graph over placeholders only, and the fake inputs of one of its places."""

    key: str
    graph_module: fx.GraphModule = field(repr=False)
    fakes: tuple[Any, ...] = field(repr=False)


def split_at_attention(gm: fx.GraphModule) -> tuple[StitchPlan, dict[str, Piece]]:
    """Cut an ATen step graph; returns the plan, and the distinct pieces by key.

    Raises: PassError if something would cross a cut that cannot: a constant that an operator at
    a cut takes, or a tensor that is not a view and has a size that is an expression.
    """
    cut = _Cut(gm)
    return cut.plan(), cut.pieces


class _Cut:
    """A graph in segments: each is one operator at a cut, or the nodes between two of them."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.pieces: dict[str, Piece] = {}
        self.root = gm  # holds the constants; a piece takes those that it reads
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        self._cuts = _cuts(self.placeholders)
        self.segment = _segments(gm.graph, self._cuts)
        self._operators = {
            index for node, index in self.segment.items() if node.target in self._cuts
        }
        self._numbers = {node: index for index, node in enumerate(self.placeholders)}
        self.sizes: dict[Any, fx.Node] = {}  # by expression, the first that is made of sizes alone
        for node in filter(_is_size, gm.graph.nodes):
            if node.all_input_nodes and all(map(_is_size, node.all_input_nodes)):
                self.sizes.setdefault(_torch_compat.size_expression(node.meta["val"]), node)
        self._made_of_sizes = _made_of_sizes(gm.graph)
        output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
        self._results = [_alias_of(node) for node in output.args[0]]

    def plan(self) -> StitchPlan:
        members: dict[int, list[fx.Node]] = {}
        for node, index in self.segment.items():
            members.setdefault(index, []).append(node)
        crossing = set(self._results)
        for node, index in self.segment.items():
            crossing |= {leaf for leaf in self.leaves(node, index) if leaf in self.segment}
        steps: list[Step] = []
        for _, nodes in sorted(members.items()):
            if nodes[0].target in self._cuts:
                steps.append(self._op_step(nodes[0]))
            else:
                steps.append(self._piece_step(nodes, [n for n in nodes if n in crossing]))
        return StitchPlan(
            num_inputs=len(self.placeholders),
            steps=tuple(steps),
            outputs=tuple(self._number(node) for node in self._results),
        )

    def leaves(self, node: fx.Node, segment: int) -> Iterator[fx.Node]:
        """The tensors from outside `segment` that `node` needs in it; sizes are left out."""
        for given in map(_alias_of, node.all_input_nodes):
            if _is_size(given) or given.op == "get_attr" or self.segment.get(given) == segment:
                continue
            if self.is_taken_again(given, segment):
                yield from self.leaves(given, segment)
            else:
                yield given

    def is_taken_again(self, node: fx.Node, segment: int) -> bool:
        """True where `segment` makes a node of another one again.

        It does so with a view that cannot cross the cut, or is one of an input of that other
        segment.  A piece also does this wherever the base can cross: the base is the one whose
        strides leave no gaps.  What is made of sizes alone, such as an arange that layers of
        experts share, is made again where it cannot cross.
        """
        if node in self._made_of_sizes and not _can_cross(node):
            return self.segment[node] != segment and segment not in self._operators
        is_view = node.op == "call_function" and _torch_compat.returns_alias(node.target)
        if not is_view or _torch_compat.is_mutable(node.target) or self.segment[node] == segment:
            return False
        base = _alias_of(node.all_input_nodes[0])
        if self.segment.get(base) != self.segment[node] or not _can_cross(node):
            return True
        return segment not in self._operators and _can_cross(base)

    def _op_step(self, node: fx.Node) -> OpStep:
        args: list[tuple[str, Any]] = []
        for arg in node.args:
            if isinstance(arg, fx.Node):
                args.append(("value", self._number(_alias_of(arg))))
            else:
                args.append(("constant", arg))
        return OpStep(target=str(node.target), args=tuple(args), output=self._new_number(node))

    def _piece_step(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> PieceStep:
        copy = _PieceGraph(self, nodes, outputs)
        piece = copy.piece()
        self.pieces.setdefault(piece.key, piece)
        for node in outputs:
            if not _can_cross(node):
                raise PassError(
                    f"{node.name} ({node.target}) has a size that is an expression and cannot "
                    "leave its piece"
                )
        return PieceStep(
            piece=piece.key,
            inputs=tuple(self._number(node) for node in copy.inputs),
            outputs=tuple(self._new_number(node) for node in outputs),
        )

    def _number(self, node: fx.Node) -> int:
        if node not in self._numbers:
            raise PassError(f"{node.name} ({node.op} {node.target}) cannot cross a cut")
        return self._numbers[node]

    def _new_number(self, node: fx.Node) -> int:
        self._numbers[node] = len(self._numbers)
        return self._numbers[node]


class _PieceGraph:
    """A copy of one segment over placeholders, in the order in which its nodes first need them."""

    def __init__(self, cut: _Cut, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        self._cut, self._segment, self._graph = cut, cut.segment[nodes[0]], fx.Graph()
        leaves = dict.fromkeys(leaf for node in nodes for leaf in cut.leaves(node, self._segment))
        self.inputs = [*leaves, *self._carriers(nodes, list(leaves))]
        self._copies: dict[fx.Node, fx.Node] = {}
        for number, node in enumerate(self.inputs):
            placeholder = self._graph.placeholder(f"input_{number}")
            placeholder.meta["val"] = node.meta["val"]
            self._copies[node] = placeholder
        for node in nodes:
            self._copy(node)
        self._graph.output(tuple(self._copies[node] for node in outputs))

    def piece(self) -> Piece:
        gm = fx.GraphModule(self._cut.root, self._graph)
        return Piece(
            key=structural_key(gm),
            graph_module=gm,
            fakes=tuple(node.meta["val"] for node in self.inputs),
        )

    def _carriers(self, nodes: Sequence[fx.Node], leaves: Sequence[fx.Node]) -> list[fx.Node]:
        """Phase inputs that have the size symbols which no leaf has."""
        needed = {symbol for node in nodes for symbol in self._symbols(node)}
        shown = {symbol for leaf in leaves for symbol in _dims(leaf)}
        carriers: list[fx.Node] = []
        for symbol in sorted(needed - shown):
            if not any(symbol in _dims(carrier) for carrier in carriers):
                carriers.append(next(n for n in self._cut.placeholders if symbol in _dims(n)))
        return carriers

    def _symbols(self, node: fx.Node) -> Iterator[str]:
        """Symbols of the sizes in the arguments of a node, or of a view that it makes again."""
        for given in map(_alias_of, node.all_input_nodes):
            if _is_size(given):
                yield from map(str, _torch_compat.size_expression(given.meta["val"]).free_symbols)
            elif given in self._cut.segment and self._cut.is_taken_again(given, self._segment):
                yield from self._symbols(given)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self._graph.node_copy(node, lambda given: self._value(_alias_of(given)))
        copy.meta = {name: node.meta[name] for name in ("val",) if name in node.meta}
        self._copies[node] = copy
        return copy

    def _value(self, node: fx.Node) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        if not _is_size(node):
            return self._copy(node)
        expression = _torch_compat.size_expression(node.meta["val"])
        if not expression.is_Symbol:
            same = self._cut.sizes.get(expression, node)  # the node may measure a far tensor
            return self._copy(node) if same is node else self._value(same)
        symbol = str(expression)
        carrier = next(given for given in self.inputs if symbol in _dims(given))
        made = self._graph.call_function(
            torch.ops.aten.sym_size.int, (self._copies[carrier], _dims(carrier)[symbol])
        )
        made.meta["val"] = node.meta["val"]
        self._copies[node] = made
        return made


def structural_key(gm: fx.GraphModule) -> str:
    """Hash of a piece: operators, arguments, input layouts, values of constants; symbols are
    numbered by first use.
    """
    constants = constants_in(gm)
    numbers: dict[fx.Node, int] = {}
    symbols: dict[str, str] = {}

    def size(value: Any) -> str:
        if isinstance(value, int):
            return str(value)
        text = _torch_compat.size_expression(value)
        names = {s: symbols.setdefault(str(s), f"s{len(symbols)}") for s in _in_order(text)}
        return str(text.xreplace({s: type(s)(name) for s, name in names.items()}))

    def written(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"%{numbers[arg]}"
        if isinstance(arg, list | tuple):
            return f"[{', '.join(map(written, arg))}]"
        if isinstance(arg, slice):
            return f"slice{written((arg.start, arg.stop, arg.step))}"
        return repr(arg)

    lines = []
    for node in gm.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            val = node.meta["val"]
            shape, stride = map(size, val.shape), map(size, val.stride())
            layout = [*shape, *stride, size(val.storage_offset()), str(val.dtype), str(val.device)]
            lines.append(" ".join(layout))
        elif node in constants:
            value = constants[node]
            lines.append(f"{value.dtype} {tuple(value.shape)} {value.tolist()}")
        else:
            keywords = sorted(node.kwargs.items())
            lines.append(
                f"{node.op} {node.target} {written(node.args)} "
                f"{[(name, written(value)) for name, value in keywords]}"
            )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _in_order(expression: Any) -> list[Any]:
    return sorted(expression.free_symbols, key=str)


def _cuts(placeholders: Sequence[fx.Node]) -> tuple[Any, ...]:
    values = (node.meta.get("val") for node in placeholders)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    on_cpu = all(traits_of(tensor.device).is_cpu for tensor in tensors)
    return (*CUTS, *CPU_CUTS) if on_cpu else CUTS


def _segments(graph: fx.Graph, cuts: Sequence[Any]) -> dict[fx.Node, int]:
    """The stretch between cuts, or the cut, that each node belongs to, in order.  Inputs, sizes,
    constants and the output belong to none; an element of several results belongs with them.

    Inputs, sizes, constants and the output belong to none; an element of several results goes with
    them.
    """
    segments: dict[fx.Node, int] = {}
    current = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or _is_size(node):
            continue
        if node.target in cuts:
            segments[node], current = current + 1, current + 2
        elif node.target is operator.getitem:
            segments[node] = segments[node.args[0]]
        else:
            segments[node] = current
    return segments


def _made_of_sizes(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that sizes and numbers alone determine, and that nothing writes."""
    written: set[fx.Node] = set()
    for node in graph.nodes:
        for index in _torch_compat.mutated_arguments(node.target):
            base = node.args[index] if index < len(node.args) else None
            while isinstance(base, fx.Node) and base not in written:
                written.add(base)
                is_alias = _torch_compat.returns_alias(base.target)
                base = base.all_input_nodes[0] if is_alias else None
    made: set[fx.Node] = set()
    for node in graph.nodes:
        is_made = node not in written and _is_sure(node.target) and not _is_size(node)
        if is_made and all(_is_size(given) or given in made for given in node.all_input_nodes):
            made.add(node)
    return made


def _is_sure(target: Any) -> bool:
    """True of an operator that writes nothing and draws nothing."""
    return (
        isinstance(target, OpOverload)
        and not _torch_compat.is_mutable(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _alias_of(node: fx.Node) -> fx.Node:
    """The tensor that an in-place operation wrote; for other nodes, the node itself."""
    while (
        node.op == "call_function"
        and _torch_compat.is_mutable(node.target)
        and _torch_compat.returns_alias(node.target)
    ):
        node = node.all_input_nodes[0]
    return node


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | int)


def _dims(node: fx.Node) -> dict[str, int]:
    """The symbols that are sizes of a tensor, and their dimensions."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return {}
    sizes = [
        (_torch_compat.size_expression(n), d)
        for d, n in enumerate(value.shape)
        if not isinstance(n, int)
    ]
    return {str(expression): dim for expression, dim in reversed(sizes) if expression.is_Symbol}


def _can_cross(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(
        isinstance(size, int) or _torch_compat.size_expression(size).is_Symbol
        for size in value.shape
    )
