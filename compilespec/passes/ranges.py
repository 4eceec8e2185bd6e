"""Which integers a node of a step graph can hold: intervals whose ends are sympy expressions.

An abstract interpreter over ATen.  It is sound, not complete: an operator that it does not know
gives the whole range of the node's dtype.  `where` is followed by cases: under a condition on a
node, the branch is evaluated again with what the condition says about the same element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.passes.aliases import storage_root
from compilespec.passes.range_rules import AND, BOUNDING, COMPARISONS, ELEMENTWISE, NOT, OR, OTHER
from compilespec.passes.sizes import (
    BLOCK_SIZE,
    MAX_BATCH,
    NUM_BLOCKS,
    NUM_TABLE_BLOCKS,
    B,
    Expr,
    K,
    L,
    R,
    Range,
    Sizes,
    T,
    V,
    integers,
)
from compilespec.program import NUM_KEPT, InputSpec

_aten = torch.ops.aten


BOOL = integers(0, 1)

# What the host promises about batch inputs, and what state rows hold between steps.  The claims of
# `claims.py` include that every step leaves its state so; a test holds the host to the rest.
CONTRACT: dict[str, Range] = {
    "row_B": integers(-1, MAX_BATCH - 1),
    "row_T": integers(-1, MAX_BATCH - 1),
    "commit_row_R": integers(-1, MAX_BATCH - 1),
    "ids_T": integers(-1, V - 1),
    "next_T": integers(-1, V - 1),
    "position_T": integers(0, L - 1),
    "owner_T": integers(0, R - 1),
    "last_R": integers(0, T - 1),
    "tokens_RS": integers(-1, V - 1),
    "history_RL": integers(-1, V - 1),
    "processed_RL": integers(-1, V - 1),
    "withheld_R": integers(0, K),
    "ring_ids_RK": integers(0, V - 1),
    "kept_ids_RW": integers(0, V - 1),
    "backlog_B": integers(0, NUM_KEPT),
    "seq_len_R": integers(0, L),
    "block_table_RM": integers(-1, NUM_BLOCKS - 1),
}
_SHAPES: dict[str, tuple[Expr, ...]] = {
    "tokens_RS": (MAX_BATCH + 1, K + 1),
    "seq_len_R": (MAX_BATCH + 1,),
    "block_table_RM": (MAX_BATCH + 1, NUM_TABLE_BLOCKS),
    "cache": (NUM_BLOCKS, BLOCK_SIZE),
}
_SYMBOLS = {"B": B, "T": T, "R": R}

# Which dimension of the tensor under evaluation each dimension of a node is; None where its size
# is 1.  Two uses of a node under equal views are the same element.
View = tuple[int | None, ...]
Facts = dict[tuple[fx.Node, View], Range]
Evaluate = Callable[[Any], Range | None]


class Ranges:
    """Ranges of one graph's nodes, computed when asked for.

    Args:
        inputs: what feeds each placeholder, by role; weights: integer ones are read for their
        values (those on the meta device have none).
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        sizes: Sizes,
        inputs: Mapping[str, InputSpec],
        weights: Mapping[str, Tensor],
    ) -> None:
        self.gm, self.sizes, self.inputs, self.weights = gm, sizes, inputs, weights
        self._known: dict[fx.Node, Range | None] = {}
        self._written = _integers_written(gm.graph)
        self._symbols: dict[str, Expr] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            spec = inputs.get(str(node.meta.get("role")))
            if spec is not None and spec.kind == "batch":
                size = node.meta["val"].shape[0] if node.meta["val"].dim() else 1
                if not isinstance(size, int) and spec.name[-1] in _SYMBOLS:
                    self._symbols[str(size)] = _SYMBOLS[spec.name[-1]]

    # --- asking ---

    def of(self, node: Any) -> Range | None:
        """The range of an integer node or scalar; None for anything else."""
        return self._evaluate(node, _identity(node), {})

    def given(self, node: fx.Node, facts: Facts) -> Range | None:
        """The range of the elements for which `facts` hold; empty (low > high): there are none."""
        return self._evaluate(node, _identity(node), facts)

    def exact(self, node: fx.Node) -> Range | None:
        """What the node would hold in integers without end: outside its dtype where it wraps."""
        return self._transfer(node, _identity(node), {})

    def size(self, node: fx.Node, dim: int) -> Expr:
        """A dimension of a tensor, in named sizes."""
        shape = node.meta["val"].shape
        dim = dim % len(shape)
        if node.op == "placeholder":
            role = str(node.meta.get("role"))
            named = _SHAPES.get("cache" if role.startswith("cache.") else role, ())
            if dim < len(named) and self.sizes.value(named[dim]) == shape[dim]:
                return named[dim]
        return self.sizes.of(shape[dim], self._symbols)

    def within(self, value: Range | None, needed: Range) -> bool:
        """Whether every value of the range certainly is in `needed`; an empty range is."""
        return value is not None and self.sizes.within(value, needed)

    def cone(self, node: fx.Node) -> list[tuple[fx.Node, View]]:
        """The nodes from which an element is computed element by element, itself included;
        conditions of `where` are not followed.
        """
        return _walk(node, lambda one: one.target in ELEMENTWISE or one.target in BOUNDING)

    def before_bounds(self, node: fx.Node) -> list[tuple[fx.Node, View]]:
        """The values that masks and clamps turn into the node: what it would be without them."""
        found = _walk(node, lambda one: one.target in BOUNDING)
        return [
            pair
            for pair in found
            if pair[0].target not in _VIEWS and pair[0].target not in BOUNDING
        ]

    def constant(self, node: Any) -> Tensor | None:
        """The value of a node that is a single integer weight."""
        spec = self.inputs.get(str(node.meta.get("role"))) if isinstance(node, fx.Node) else None
        if spec is None or len(spec.sources) != 1 or node.op != "placeholder":
            return None
        tensor = self.weights.get(spec.sources[0])
        return tensor if integer_range(tensor) is not None else None

    def same_element(self, left: Any, right: Any) -> bool:
        """Whether two operands of one element-wise node are views of the same element."""
        if not (_is_tensor(left) and _is_tensor(right)):
            return False
        return _source(left, _identity(left)) == _source(right, _identity(right))

    # --- evaluating ---

    def _evaluate(self, value: Any, view: View, facts: Facts) -> Range | None:
        if isinstance(value, (bool, int)):
            number = self.sizes.name(int(value))
            return Range(number, number)
        if not isinstance(value, fx.Node):
            return None
        if not facts and value in self._known:
            return self._known[value]
        held = value.meta.get("val")
        if isinstance(held, torch.SymInt):
            size = self.sizes.of(held, self._symbols)
            return Range(size, size)
        if isinstance(held, int):
            return self._evaluate(held, (), {})
        whole = _whole(value)
        if whole is None:
            return None
        result = self._transfer(value, view, facts)
        if result is None or not self.sizes.within_numbers(result, whole):
            result = whole  # the operator is not known, or wraps
        if (value, view) in facts:
            result = self.sizes.meet(result, facts[value, view])
        if not facts:
            self._known[value] = result
        return result

    def _transfer(self, node: fx.Node, view: View, facts: Facts) -> Range | None:
        """The range that the node's operator makes of its operands'; None: not known."""
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return integer_range(_attribute(self.gm, str(node.target)))
        if node.op != "call_function" or self._is_overwritten(node):
            return None
        if node.target is _aten.where.self:
            return self._where(node, view, facts)
        if node.target in _VIEWS:
            source, source_view = _VIEWS[node.target](node, view)
            return self._evaluate(source, source_view, facts)
        if node.target in ELEMENTWISE:

            def operand(arg: Any) -> Range | None:
                return self._evaluate(arg, _aligned(arg, view) if _is_tensor(arg) else (), facts)

            return ELEMENTWISE[node.target](self, node, operand)
        rule = OTHER.get(node.target)
        return rule(self, node, self.of) if rule is not None else None

    def _is_overwritten(self, node: fx.Node) -> bool:
        """Whether an in-place operator writes the temporary that the node is, or is a view of."""
        root = storage_root(node)
        return root.op != "placeholder" and root in self._written

    def _input(self, node: fx.Node) -> Range | None:
        role = str(node.meta.get("role"))
        spec = self.inputs.get(role)
        if spec is None or spec.kind != "weight":
            known = CONTRACT.get(role)
            unknown_vocab = V not in self.sizes.values
            return (
                None if known is None or (unknown_vocab and V in known.high.free_symbols) else known
            )
        parts = [integer_range(self.weights.get(source)) for source in spec.sources]
        return self.sizes.join(parts) if parts else None

    def _where(self, node: fx.Node, view: View, facts: Facts) -> Range | None:
        condition, *branches = node.args
        reached = []
        for branch, truth in zip(branches, (True, False), strict=True):
            assumed = self._assume(condition, truth, _aligned(condition, view), facts)
            if assumed is not None:
                aligned = _aligned(branch, view) if _is_tensor(branch) else ()
                value = self._evaluate(branch, aligned, assumed)
                if value is None:
                    return None
                if not self.sizes.is_empty(value):
                    reached.append(value)
        return self.sizes.join(reached) if reached else integers(1, 0)

    def _assume(self, condition: Any, truth: bool, view: View, facts: Facts) -> Facts | None:
        """`facts` and that the condition is `truth`; None when it cannot be."""
        while isinstance(condition, fx.Node) and condition.target in _VIEWS:
            condition, view = _VIEWS[condition.target](condition, view)
        decided = self._evaluate(condition, view, facts)
        if decided is not None and self.sizes.is_empty(
            self.sizes.meet(decided, integers(int(truth), int(truth)))
        ):
            return None
        if not isinstance(condition, fx.Node) or condition.op != "call_function":
            return facts
        if condition.target in NOT:
            return self._assume(
                condition.args[0], not truth, _aligned(condition.args[0], view), facts
            )
        if (condition.target in AND and truth) or (condition.target in OR and not truth):
            assumed: Facts | None = facts
            for part in condition.args:
                if assumed is not None:
                    assumed = self._assume(part, truth, _aligned(part, view), assumed)
            return assumed
        if condition.target in COMPARISONS:
            return self._compare(condition, truth, view, facts)
        return facts

    def _compare(self, node: fx.Node, truth: bool, view: View, facts: Facts) -> Facts | None:
        relation = COMPARISONS[node.target]
        if not truth:
            relation = _OPPOSITE[relation]
        facts = dict(facts)
        left: Any
        right: Any
        left, right = node.args[:2]
        for subject, other, kind in ((left, right, relation), (right, left, _MIRRORED[relation])):
            if not _is_tensor(subject) or kind == "ne":
                continue
            bound = self._evaluate(other, _aligned(other, view) if _is_tensor(other) else (), facts)
            key = _source(subject, _aligned(subject, view))
            before = self._evaluate(*key, facts)
            if bound is None or before is None:
                continue
            facts[key] = self.sizes.meet(before, _half_line(kind, bound))
            if self.sizes.is_empty(facts[key]):
                return None
        return facts


# --- nodes ---


def _walk(start: fx.Node, is_followed: Callable[[fx.Node], bool]) -> list[tuple[fx.Node, View]]:
    """`start` and the operands reached from it through views and nodes that are followed."""
    found: dict[tuple[fx.Node, View], None] = {}
    frontier = [(start, _identity(start))]
    while frontier:
        node, view = frontier.pop()
        if (node, view) in found:
            continue
        found[node, view] = None
        if node.target in _VIEWS:
            frontier.append(_VIEWS[node.target](node, view))
        elif is_followed(node):
            skip = 1 if node.target is _aten.where.self else 0
            operands: list[Any] = [arg for arg in node.args[skip:] if _is_tensor(arg)]
            frontier += [(arg, _aligned(arg, view)) for arg in operands]
    return list(found)


def _identity(node: Any) -> View:
    if not _is_tensor(node):
        return ()
    return tuple(None if size == 1 else dim for dim, size in enumerate(_shape(node)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def _shape(node: fx.Node) -> list[Any]:
    """Sizes; a symbolic one is never equal to 1."""
    return [size if isinstance(size, int) else None for size in node.meta["val"].shape]


def _aligned(operand: Any, view: View) -> View:
    """The view of an operand that broadcasts to a node of this view."""
    if not _is_tensor(operand):
        return ()
    shape = _shape(operand)
    trailing = view[len(view) - len(shape) :] if shape else ()
    return tuple(None if size == 1 else dim for size, dim in zip(shape, trailing, strict=True))


def _integers_written(graph: fx.Graph) -> set[fx.Node]:
    """Storages that an in-place operator writes integers to."""
    roots = set()
    for node in graph.nodes:
        if node.op == "call_function":
            for at in _torch_compat.mutated_arguments(node.target):
                if _whole(node.args[at]) is not None:
                    roots.add(storage_root(node.args[at]))
    return roots


def _source(node: fx.Node, view: View) -> tuple[fx.Node, View]:
    """The node that holds the same element before views and widening casts."""
    while node.target in _VIEWS and (_whole(node) is not None):
        source, source_view = _VIEWS[node.target](node, view)
        if not _fits(source, node):
            break
        node, view = source, source_view
    return node, view


def _whole(node: Any) -> Range | None:
    """All integers of the node's dtype; None when it holds no integers."""
    if not _is_tensor(node):
        return None
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:
        return BOOL
    if dtype.is_floating_point or dtype.is_complex:
        return None
    limits = torch.iinfo(dtype)
    return integers(limits.min, limits.max)


def _fits(source: fx.Node, node: fx.Node) -> bool:
    """Whether the cast from `source` to `node` keeps every value."""
    inner, outer = _whole(source), _whole(node)
    return (
        inner is not None
        and outer is not None
        and bool(outer.low <= inner.low and inner.high <= outer.high)
    )


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def integer_range(tensor: Any) -> Range | None:
    """Smallest and largest entry of a constant."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return None
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    return integers(int(tensor.min()), int(tensor.max()))


def _half_line(relation: str, bound: Range) -> Range:
    """Integers that stand in `relation` to some value of `bound`."""
    low, high = {
        "lt": (-sympy.oo, bound.high - 1),
        "le": (-sympy.oo, bound.high),
        "gt": (bound.low + 1, sympy.oo),
        "ge": (bound.low, sympy.oo),
        "eq": (bound.low, bound.high),
    }[relation]
    return Range(low, high)


_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}

# --- views: the same elements under other dimensions ---


def _same(node: fx.Node, view: View) -> tuple[Any, View]:
    return node.args[0], _aligned(node.args[0], view)


def _unsqueezed(node: fx.Node, view: View) -> tuple[Any, View]:
    dim = int(node.args[1]) % len(view)  # type: ignore[arg-type]
    return node.args[0], view[:dim] + view[dim + 1 :]


def _squeezed(node: fx.Node, view: View) -> tuple[Any, View]:
    source: Any = node.args[0]
    shape = _shape(source)
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    gone = {int(dim) % len(shape) for dim in dims if shape[int(dim) % len(shape)] == 1}  # type: ignore[arg-type]
    left = iter(view)
    return source, tuple(None if dim in gone else next(left) for dim in range(len(shape)))


def _permuted(node: fx.Node, view: View) -> tuple[Any, View]:
    source: Any = node.args[0]
    order = list(range(len(view)))
    if node.target is _aten.permute.default:
        order = [int(dim) % len(view) for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    elif len(view) > 1:
        first, second = node.args[1:] if node.target is _aten.transpose.int else (0, 1)
        first, second = int(first) % len(view), int(second) % len(view)  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
    place = {dim: at for at, dim in enumerate(order)}
    return source, tuple(view[place[dim]] for dim in range(len(view)))


_VIEWS: dict[Any, Callable[[fx.Node, View], tuple[Any, View]]] = {
    **dict.fromkeys(
        (
            _aten.alias.default,
            _aten.detach.default,
            _aten.clone.default,
            _aten.expand.default,
            _aten._to_copy.default,
            _aten.lift_fresh_copy.default,
        ),
        _same,
    ),
    _aten.unsqueeze.default: _unsqueezed,
    _aten.squeeze.dim: _squeezed,
    _aten.squeeze.dims: _squeezed,
    _aten.permute.default: _permuted,
    _aten.transpose.int: _permuted,
    _aten.t.default: _permuted,
}
