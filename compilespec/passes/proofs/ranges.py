"""The integers that a node of a step graph can hold: intervals whose ends are sympy expressions.

This is an abstract interpreter over ATen.  It is sound, not complete: an operator that it does not
know gives the whole range of the node's dtype.  `where` is analysed by cases: each branch is
evaluated again with what the condition says about the same element.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.ops.device import traits_of
from compilespec.passes.graph.aliases import storage_root
from compilespec.passes.proofs.element_views import (
    VIEWS,
    View,
    dtype_range,
    is_tensor,
    operand_view,
    own_view,
    source_element,
    walk,
)
from compilespec.passes.proofs.input_ranges import BATCH_SYMBOLS, CONTRACT, STATE_SHAPES
from compilespec.passes.proofs.range_rules import (
    AND,
    BOUNDING,
    COMPARISONS,
    ELEMENTWISE,
    NOT,
    OR,
    OTHER,
)
from compilespec.passes.proofs.sizes import Expr, Range, Sizes, V, integers
from compilespec.program import InputSpec

_aten = torch.ops.aten


Facts = dict[tuple[fx.Node, View], Range]
Evaluate = Callable[[Any], Range | None]


class Ranges:
    """Ranges of one graph's nodes, computed on demand.

    Args:
        inputs: the input of each placeholder, by role.
        weights: integer weights are read for their values (those on the meta device have none).
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
                if not isinstance(size, int) and spec.name[-1] in BATCH_SYMBOLS:
                    self._symbols[str(size)] = BATCH_SYMBOLS[spec.name[-1]]

    # --- asking ---

    def of(self, node: Any) -> Range | None:
        """The range of an integer node or scalar; None for anything else."""
        return self._evaluate(node, own_view(node), {})

    def given(self, node: fx.Node, facts: Facts) -> Range | None:
        """The range of the elements for which `facts` hold; empty (low > high): there are none."""
        return self._evaluate(node, own_view(node), facts)

    def exact(self, node: fx.Node) -> Range | None:
        """The node's range in unbounded integers: outside its dtype if it wraps."""
        return self._transfer(node, own_view(node), {})

    def size(self, node: fx.Node, dim: int) -> Expr:
        """A dimension of a tensor, in named sizes."""
        shape = node.meta["val"].shape
        dim = dim % len(shape)
        if node.op == "placeholder":
            role = str(node.meta.get("role"))
            named = STATE_SHAPES.get("cache" if role.startswith("cache.") else role, ())
            if dim < len(named) and self.sizes.value(named[dim]) == shape[dim]:
                return named[dim]
        return self.sizes.of(shape[dim], self._symbols)

    def within(self, value: Range | None, needed: Range) -> bool:
        """True where every value of the range is certainly in `needed`; true of an empty range."""
        return value is not None and self.sizes.within(value, needed)

    def cone(self, node: fx.Node) -> list[tuple[fx.Node, View]]:
        """The nodes from which an element is computed element by element, itself included;
        conditions of `where` are not followed.
        """
        return walk(node, lambda one: one.target in ELEMENTWISE or one.target in BOUNDING)

    def before_bounds(self, node: fx.Node) -> list[tuple[fx.Node, View]]:
        """The node's values before masks and clamps."""
        found = walk(node, lambda one: one.target in BOUNDING)
        return [
            pair for pair in found if pair[0].target not in VIEWS and pair[0].target not in BOUNDING
        ]

    def constant(self, node: Any) -> Tensor | None:
        """The value of a node that is a single integer weight."""
        spec = self.inputs.get(str(node.meta.get("role"))) if isinstance(node, fx.Node) else None
        if spec is None or len(spec.sources) != 1 or node.op != "placeholder":
            return None
        tensor = self.weights.get(spec.sources[0])
        return tensor if integer_range(tensor) is not None else None

    def same_element(self, left: Any, right: Any) -> bool:
        """True where two operands of one element-wise node are views of the same element."""
        if not (is_tensor(left) and is_tensor(right)):
            return False
        return source_element(left, own_view(left)) == source_element(right, own_view(right))

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
        whole = dtype_range(value)
        if whole is None:
            return None
        result = self._transfer(value, view, facts)
        if result is None or not self.sizes.within_numbers(result, whole):
            result = whole  # the operator is unknown, or wraps
        if (value, view) in facts:
            result = self.sizes.meet(result, facts[value, view])
        if not facts:
            self._known[value] = result
        return result

    def _transfer(self, node: fx.Node, view: View, facts: Facts) -> Range | None:
        """The range that follows from the operands' by the operator's rule; None if unknown."""
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return integer_range(operator.attrgetter(str(node.target))(self.gm))
        if node.op != "call_function" or self._is_overwritten(node):
            return None
        if node.target is _aten.where.self:
            return self._where(node, view, facts)
        if node.target in VIEWS:
            source, source_view = VIEWS[node.target](node, view)
            return self._evaluate(source, source_view, facts)
        if node.target in ELEMENTWISE:

            def operand(arg: Any) -> Range | None:
                return self._evaluate(arg, operand_view(arg, view) if is_tensor(arg) else (), facts)

            return ELEMENTWISE[node.target](self, node, operand)
        rule = OTHER.get(node.target)
        return rule(self, node, self.of) if rule is not None else None

    def _is_overwritten(self, node: fx.Node) -> bool:
        """True where an in-place operator writes the temporary that the node is or views."""
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
            assumed = self._assume(condition, truth, operand_view(condition, view), facts)
            if assumed is not None:
                aligned = operand_view(branch, view) if is_tensor(branch) else ()
                value = self._evaluate(branch, aligned, assumed)
                if value is None:
                    return None
                if not self.sizes.is_empty(value):
                    reached.append(value)
        return self.sizes.join(reached) if reached else integers(1, 0)

    def _assume(self, condition: Any, truth: bool, view: View, facts: Facts) -> Facts | None:
        """`facts`, and that the condition is `truth`; None if it cannot be."""
        while isinstance(condition, fx.Node) and condition.target in VIEWS:
            condition, view = VIEWS[condition.target](condition, view)
        decided = self._evaluate(condition, view, facts)
        if decided is not None and self.sizes.is_empty(
            self.sizes.meet(decided, integers(int(truth), int(truth)))
        ):
            return None
        if not isinstance(condition, fx.Node) or condition.op != "call_function":
            return facts
        if condition.target in NOT:
            return self._assume(
                condition.args[0], not truth, operand_view(condition.args[0], view), facts
            )
        if (condition.target in AND and truth) or (condition.target in OR and not truth):
            assumed: Facts | None = facts
            for part in condition.args:
                if assumed is not None:
                    assumed = self._assume(part, truth, operand_view(part, view), assumed)
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
            if not is_tensor(subject) or kind == "ne":
                continue
            bound = self._evaluate(
                other, operand_view(other, view) if is_tensor(other) else (), facts
            )
            key = source_element(subject, operand_view(subject, view))
            before = self._evaluate(*key, facts)
            if bound is None or before is None:
                continue
            facts[key] = self.sizes.meet(before, _half_line(kind, bound))
            if self.sizes.is_empty(facts[key]):
                return None
        return facts


# --- nodes ---


def _integers_written(graph: fx.Graph) -> set[fx.Node]:
    """Storages to which an in-place operator writes integers."""
    roots = set()
    for node in graph.nodes:
        if node.op == "call_function":
            for at in _torch_compat.mutated_arguments(node.target):
                if dtype_range(node.args[at]) is not None:
                    roots.add(storage_root(node.args[at]))
    return roots


def integer_range(tensor: Any) -> Range | None:
    """Smallest and largest entry of a constant."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return None
    if traits_of(tensor.device).is_meta or tensor.numel() == 0:
        return None
    return integers(int(tensor.min()), int(tensor.max()))


def _half_line(relation: str, bound: Range) -> Range:
    """Integers that are in `relation` to some value of `bound`."""
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
