"""The range of each ATen operator's result, from its operands' ranges; others are unknown."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

import compilespec.ops.collectives
import compilespec.ops.sample.probabilities  # noqa: F401  (registers the operators)
from compilespec.passes.proofs.sizes import Expr, Range, Sizes, integers
from compilespec.tracing.structure import argument

_aten = torch.ops.aten
Operand = Callable[[Any], Range | None]


class RangeQueries(Protocol):
    """The queries of a rule to the interpreter that calls it (`passes.proofs.ranges.Ranges`)."""

    @property
    def sizes(self) -> Sizes:
        """Named sizes and what is known about their order."""

    def size(self, node: fx.Node, dim: int) -> Expr:
        """A dimension of a tensor, in named sizes."""

    def constant(self, node: Any) -> Tensor | None:
        """The integer tensor that a node always holds; None if it may vary."""

    def same_element(self, left: Any, right: Any) -> bool:
        """True where two nodes hold the same element at every place."""


Rule = Callable[[RangeQueries, fx.Node, Operand], Range | None]


# --- element by element ---


def _add(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    left, right = operand(node.args[0]), operand(node.args[1])
    if left is None or right is None or node.kwargs:
        return None
    known = _sum_with_lookup(ranges, node)
    return known or Range(left.low + right.low, left.high + right.high)


def _sum_with_lookup(ranges: RangeQueries, node: fx.Node) -> Range | None:
    """i + table[i] of a constant table, such as draft ids mapped by d2t: every i is checked."""
    args: Any = node.args
    for index, value in (args[:2], args[1::-1]):
        if not isinstance(value, fx.Node) or value.target is not _aten.index.Tensor:
            continue
        indices: Any = value.args[1]
        table = ranges.constant(value.args[0])
        if table is None or table.dim() != 1 or not ranges.same_element(index, indices[0]):
            continue
        total = table + torch.arange(len(table), device=table.device)
        return integers(int(total.min()), int(total.max()))
    return None


def _sub(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    left, right = operand(node.args[0]), operand(node.args[1])
    if left is None or right is None or node.kwargs:
        return None
    return Range(left.low - right.high, left.high - right.low)


def _neg(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    value = operand(node.args[0])
    return None if value is None else Range(-value.high, -value.low)


def _mul(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return _product(ranges, operand(node.args[0]), operand(node.args[1]))


def _product(ranges: RangeQueries, left: Range | None, right: Range | None) -> Range | None:
    if left is None or right is None:
        return None
    ends = [sympy.expand(a * b) for a in (left.low, left.high) for b in (right.low, right.high)]
    return Range(ranges.sizes.smallest(ends), ranges.sizes.largest(ends))


def _floor_divide(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """Integers: floor(x / c) = ceiling((x + 1) / c) - 1, which sympy can compare."""
    if node.target is _aten.div.Tensor_mode and node.kwargs.get("rounding_mode") != "floor":
        return None
    value, divisor = operand(node.args[0]), operand(node.args[1])
    if value is None or divisor is None or divisor.low != divisor.high:
        return None
    if not ranges.sizes.le(sympy.Integer(1), divisor.low):
        return None
    low, high = (
        end if end == 0 else sympy.ceiling((end + 1) / divisor.low) - 1
        for end in (value.low, value.high)
    )
    return Range(low, high)


def _remainder(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    value, divisor = operand(node.args[0]), operand(node.args[1])
    if divisor is None or not ranges.sizes.le(sympy.Integer(1), divisor.low):
        return None
    full = Range(sympy.Integer(0), divisor.high - 1)
    smallest = Range(sympy.Integer(0), divisor.low - 1)
    return value if value is not None and ranges.sizes.within(value, smallest) else full


def _clamp(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    limits = dict(zip(("self", "min", "max"), node.args, strict=False)) | dict(node.kwargs)
    if node.target in (_aten.clamp_max.default, _aten.clamp_max.Tensor):
        limits = {"self": node.args[0], "max": node.args[1]}
    value = operand(limits["self"])
    if value is None:
        return None
    sizes = ranges.sizes
    for name, pick in (("min", sizes.largest), ("max", sizes.smallest)):
        if limits.get(name) is not None:
            bound = operand(limits[name])
            if bound is None:
                return None
            value = Range(pick([value.low, bound.low]), pick([value.high, bound.high]))
    return value


def _minimum(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    left, right = operand(node.args[0]), operand(node.args[1])
    if left is None or right is None:
        return None
    pick = ranges.sizes.smallest if node.target is _aten.minimum.default else ranges.sizes.largest
    return Range(pick([left.low, right.low]), pick([left.high, right.high]))


def _abs(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    value = operand(node.args[0])
    if value is None:
        return None
    return Range(sympy.Integer(0), ranges.sizes.largest([value.high, -value.low]))


def _masked_fill(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return ranges.sizes.join([operand(node.args[0]), operand(node.args[2])])


def _compare(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """Decided if the ranges leave one answer."""
    left, right = operand(node.args[0]), operand(node.args[1])
    if left is None or right is None:
        return integers(0, 1)
    name, le = COMPARISONS[node.target], ranges.sizes.le
    if name in ("gt", "ge"):
        left, right, name = right, left, {"gt": "lt", "ge": "le"}[name]
    before, after = le(left.high + 1, right.low), le(right.high + 1, left.low)
    if name == "lt" and (before or le(right.high, left.low)):
        return integers(int(before), int(before))
    if name == "le" and (after or le(left.high, right.low)):
        return integers(int(not after), int(not after))
    if name in ("eq", "ne") and (before or after):
        return integers(int(name == "ne"), int(name == "ne"))
    return integers(0, 1)


def _and(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return _bits(node, operand, min)


def _or(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return _bits(node, operand, max)


def _bits(node: fx.Node, operand: Operand, pick: Callable[..., Any]) -> Range | None:
    """For booleans; nothing is known for integers."""
    parts = [operand(arg) for arg in node.args]
    if node.meta["val"].dtype != torch.bool or any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    return Range(pick(part.low for part in known), pick(part.high for part in known))


def _not(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    value = operand(node.args[0])
    if node.meta["val"].dtype != torch.bool or value is None:
        return None
    return Range(1 - value.high, 1 - value.low)


# --- selections, reductions, constants ---


def _first(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """The result holds some of the elements of the first argument."""
    return operand(node.args[0])


def _all_of_list(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    parts: Any = node.args[0]
    return ranges.sizes.join([operand(part) for part in parts])


def _with_values(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """The first argument, some of its elements replaced by those of the last."""
    return ranges.sizes.join([operand(node.args[0]), operand(node.args[-1])])


def _getitem(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    source, index = node.args
    if not isinstance(source, fx.Node):
        return None
    if source.target in _PARTS:
        return operand(source.args[0])
    if source.target in _WITH_INDICES:
        if index == 0:
            return operand(source.args[0])
        dim = argument(source, _WITH_INDICES[source.target], "dim", -1)
        return _index_along(ranges, source.args[0], dim)
    if source.target is torch.ops.compilespec.argmax_shard.default and index == 0:
        num_ids: Any = source.args[1]
        return Range(sympy.Integer(0), sympy.Integer(num_ids - 1))
    if source.target is torch.ops.compilespec.argmax_linear.default and index == 0:
        return _index_along(ranges, source.args[1], 0)
    if source.target is torch.ops.compilespec.roll_window.default and index == 1:
        return ranges.sizes.join([operand(source.args[1]), operand(source.args[4])])
    return None


def _argmax(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    dim = argument(node, 1, "dim")
    return None if dim is None else _index_along(ranges, node.args[0], dim)


def _choice(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """An index into the logits, or the overridden value."""
    return ranges.sizes.join([operand(node.args[1]), _index_along(ranges, node.args[0], -1)])


def _draft_choice(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """The id of an entry of the logits, or the overridden value."""
    ids: Any = node.args[2]
    entry = _index_along(ranges, node.args[0], -1) if ids is None else operand(ids)
    return ranges.sizes.join([operand(node.args[1]), entry])


def _choice_of_ranks(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """An id of all ranks' logits, or the overridden value."""
    num_ids: Any = node.args[-2]
    return ranges.sizes.join(
        [operand(node.args[1]), Range(sympy.Integer(0), sympy.Integer(num_ids - 1))]
    )


def _argument_of_weights(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    """An index into the weights."""
    return _index_along(ranges, node.args[0], -1)


def _index_along(ranges: RangeQueries, tensor: Any, dim: int) -> Range:
    return Range(sympy.Integer(0), ranges.size(tensor, dim) - 1)


def _arange(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    start: Any = 0 if node.target is _aten.arange.default else node.args[0]
    end: Any = node.args[0] if node.target is _aten.arange.default else node.args[1]
    step = node.args[2] if node.target is _aten.arange.start_step and len(node.args) > 2 else 1
    first, last = operand(start), operand(end)
    if first is None or last is None or step != 1:
        return None
    return Range(first.low, last.high - 1)


def _full(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return operand(node.args[0 if node.target is _aten.scalar_tensor.default else -1])


def _zeros(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return integers(0, 0)


def _ones(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return integers(1, 1)


def _sum(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    value = operand(node.args[0])
    source: Any = node.args[0]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if value is None:
        return None
    count: Any = sympy.Integer(1)
    for dim in dims or range(source.meta["val"].dim()):
        count = count * ranges.size(source, dim)
    return _product(ranges, value, Range(count, count))


def _cumsum(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    value, source = operand(node.args[0]), node.args[0]
    if value is None or not isinstance(source, fx.Node):
        return None
    count = ranges.size(source, int(node.args[1]))  # type: ignore[arg-type]
    return _product(ranges, value, Range(sympy.Integer(1), count))


def _cumprod(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    value = operand(node.args[0])
    return value if value is not None and ranges.sizes.within(value, integers(0, 1)) else None


def _any(ranges: RangeQueries, node: fx.Node, operand: Operand) -> Range | None:
    return integers(0, 1)


COMPARISONS: dict[Any, str] = {
    getattr(getattr(_aten, name), overload): name
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Scalar", "Tensor")
}
AND = (_aten.bitwise_and.Tensor, _aten.logical_and.default)
OR = (_aten.bitwise_or.Tensor, _aten.logical_or.default)
NOT = (_aten.bitwise_not.default, _aten.logical_not.default)

ELEMENTWISE: dict[Any, Rule] = {
    _aten.add.Tensor: _add,
    _aten.add.Scalar: _add,
    _aten.sub.Tensor: _sub,
    _aten.sub.Scalar: _sub,
    _aten.neg.default: _neg,
    _aten.mul.Tensor: _mul,
    _aten.mul.Scalar: _mul,
    _aten.floor_divide.default: _floor_divide,
    _aten.div.Tensor_mode: _floor_divide,
    _aten.remainder.Scalar: _remainder,
    _aten.remainder.Tensor: _remainder,
    _aten.clamp.default: _clamp,
    _aten.clamp.Tensor: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_min.Tensor: _clamp,
    _aten.clamp_max.default: _clamp,
    _aten.clamp_max.Tensor: _clamp,
    _aten.minimum.default: _minimum,
    _aten.maximum.default: _minimum,
    _aten.abs.default: _abs,
    _aten.masked_fill.Scalar: _masked_fill,
    **dict.fromkeys(COMPARISONS, _compare),
    **dict.fromkeys(AND, _and),
    **dict.fromkeys(OR, _or),
    **dict.fromkeys(NOT, _not),
}

BOUNDING = (  # each element is that of one operand
    _aten.where.self,
    _aten.masked_fill.Scalar,
    _aten.clamp.default,
    _aten.clamp.Tensor,
    _aten.clamp_min.default,
    _aten.clamp_min.Tensor,
    _aten.clamp_max.default,
    _aten.clamp_max.Tensor,
    _aten.minimum.default,
    _aten.maximum.default,
)

_PARTS = (
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.chunk.default,
)
_WITH_INDICES = {  # the position of their `dim` argument
    _aten.topk.default: 2,
    _aten.sort.default: 1,
    _aten.sort.stable: 9,  # by name only
    _aten.max.dim: 1,
    _aten.min.dim: 1,
    torch.ops.compilespec.row_topk.default: 3,  # it has none: the last
}

OTHER: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            _aten.view.default,
            _aten._unsafe_view.default,
            _aten.reshape.default,
            _aten.slice.Tensor,
            _aten.select.int,
            _aten.index.Tensor,
            _aten.index_select.default,
            _aten.gather.default,
            _aten.embedding.default,
            _aten.repeat.default,
            _aten.flip.default,
            _aten.roll.default,
            _aten.amax.default,
            _aten.amin.default,
            _aten.max.default,
            _aten.min.default,
        ),
        _first,
    ),
    **dict.fromkeys((_aten.cat.default, _aten.stack.default), _all_of_list),
    **dict.fromkeys(
        (
            _aten.scatter.src,
            _aten.scatter.value,
            _aten.index_copy.default,
            _aten.constant_pad_nd.default,
        ),
        _with_values,
    ),
    operator.getitem: _getitem,
    _aten.argmax.default: _argmax,
    _aten.argmin.default: _argmax,
    torch.ops.compilespec.sample.default: _choice,
    torch.ops.compilespec.draw.default: _draft_choice,
    torch.ops.compilespec.sample_shard.default: _choice_of_ranks,
    torch.ops.compilespec.draw_shard.default: _choice_of_ranks,
    torch.ops.compilespec.draw_weighted.default: _argument_of_weights,
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.arange.start_step: _arange,
    _aten.scalar_tensor.default: _full,
    _aten.full.default: _full,
    _aten.full_like.default: _full,
    _aten.new_full.default: _full,
    **dict.fromkeys(
        (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default), _zeros
    ),
    **dict.fromkeys((_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default), _ones),
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.cumsum.default: _cumsum,
    _aten.cumprod.default: _cumprod,
    **dict.fromkeys((_aten.any.default, _aten.any.dim, _aten.all.default, _aten.all.dim), _any),
}
