"""Maps each element of a node, through views, to the tensor element that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.passes.proofs.sizes import Range, integers

_aten = torch.ops.aten
BOOL = integers(0, 1)

# For each dimension of a node, the dimension of the evaluated tensor that it is; None if its size
# is 1.  Two uses of a node under equal views are the same element.
View = tuple[int | None, ...]


def walk(start: fx.Node, is_followed: Callable[[fx.Node], bool]) -> list[tuple[fx.Node, View]]:
    """`start` and the operands reachable from it through views and followed nodes."""
    found: dict[tuple[fx.Node, View], None] = {}
    frontier = [(start, own_view(start))]
    while frontier:
        node, view = frontier.pop()
        if (node, view) in found:
            continue
        found[node, view] = None
        if node.target in VIEWS:
            frontier.append(VIEWS[node.target](node, view))
        elif is_followed(node):
            skip = 1 if node.target is _aten.where.self else 0
            operands: list[Any] = [arg for arg in node.args[skip:] if is_tensor(arg)]
            frontier += [(arg, operand_view(arg, view)) for arg in operands]
    return list(found)


def own_view(node: Any) -> View:
    if not is_tensor(node):
        return ()
    return tuple(None if size == 1 else dim for dim, size in enumerate(_shape(node)))


def is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def _shape(node: fx.Node) -> list[Any]:
    """Sizes; a symbolic one is never equal to 1."""
    return [size if isinstance(size, int) else None for size in node.meta["val"].shape]


def operand_view(operand: Any, view: View) -> View:
    """The view of an operand that broadcasts to a node of this view."""
    if not is_tensor(operand):
        return ()
    shape = _shape(operand)
    trailing = view[len(view) - len(shape) :] if shape else ()
    return tuple(None if size == 1 else dim for size, dim in zip(shape, trailing, strict=True))


def source_element(node: fx.Node, view: View) -> tuple[fx.Node, View]:
    """The node that holds the same element before views and widening casts."""
    while node.target in VIEWS and (dtype_range(node) is not None):
        source, source_view = VIEWS[node.target](node, view)
        if not _fits(source, node):
            break
        node, view = source, source_view
    return node, view


def dtype_range(node: Any) -> Range | None:
    """All integers of the node's dtype; None if it holds no integers."""
    if not is_tensor(node):
        return None
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:
        return BOOL
    if dtype.is_floating_point or dtype.is_complex:
        return None
    limits = torch.iinfo(dtype)
    return integers(limits.min, limits.max)


def _fits(source: fx.Node, node: fx.Node) -> bool:
    """True where the cast from `source` to `node` keeps every value."""
    inner, outer = dtype_range(source), dtype_range(node)
    return (
        inner is not None
        and outer is not None
        and bool(outer.low <= inner.low and inner.high <= outer.high)
    )


def _same(node: fx.Node, view: View) -> tuple[Any, View]:
    return node.args[0], operand_view(node.args[0], view)


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


VIEWS: dict[Any, Callable[[fx.Node, View], tuple[Any, View]]] = {
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
