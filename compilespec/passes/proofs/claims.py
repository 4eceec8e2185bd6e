"""Claims about the integers of a step graph, and whether their ranges prove them.

A claim is about one operand of one node: an index inside its tensor, a slot inside the cache, a
position inside the maximum length, a state row that keeps its contract, an int32 that does not
wrap.  `bound_positions` guards the operands of claims that are not proved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import fx

from compilespec import _torch_compat
from compilespec.passes.graph.aliases import storage_root, written_roots
from compilespec.passes.proofs.input_ranges import CONTRACT
from compilespec.passes.proofs.ranges import Facts, Ranges
from compilespec.passes.proofs.sizes import K, L, Range, V, integers
from compilespec.passes.splice.evidence import NUM_BITS

_aten = torch.ops.aten
GUARD_PASS = "bound_positions"

Place = tuple[int, ...]  # the place of an operand: (argument,) or (argument, element of a list)
Guard = Literal["clamp", "redirect", "pad"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One operand of one node and the range it must stay in."""

    what: str  # "slot inside the cache"
    node: fx.Node
    place: Place = ()
    value: Range | None = None  # None: nothing is known
    needed: Range
    holds: bool
    is_guarded: bool = False  # the operand is one that `bound_positions` made
    guard: Guard | None = None  # what can be inserted if it does not hold
    subject: fx.Node | None = None  # "pad": the position that decides; else the indexed tensor
    dim: int = 0  # the dimension that is indexed
    hazards: tuple[str, ...] = ()
    detail: str = ""


def find_claims(ranges: Ranges) -> Iterator[Claim]:
    """Every claim about the graph, in graph order."""
    positions = _position_nodes(ranges)
    yield _attention_metadata_is_not_written(ranges)
    for node in ranges.gm.graph.nodes:
        if node.op == "output":
            yield from _outputs(ranges, node)
        if node.op != "call_function":
            continue
        if node.target is torch.ops.compilespec.paged_attention.default:
            yield from _attention(ranges, node)
        if node.target is torch.ops.compilespec.write_cache.default:
            yield _kept_slots(ranges, node)
        if node.target in _STATES:
            yield from _recurrent_state(ranges, node)
        yield from _indices(ranges, node, positions)
        yield from _state_writes(ranges, node)
        yield from _arithmetic(ranges, node, positions)


def operand_at(node: fx.Node, place: Place) -> Any:
    value: Any = node.args
    for index in place:
        value = value[index]
    return value


# --- indices ---


def _indices(ranges: Ranges, node: fx.Node, positions: set[fx.Node]) -> Iterator[Claim]:
    for place, tensor, dim in _index_operands(node):
        index = operand_at(node, place)
        rows = ranges.size(tensor, dim)
        name = str(tensor.meta.get("role") or tensor.name)
        is_position = any(one in positions for one, _ in ranges.cone(index))
        what = f"index into {name}"
        if node.target is _aten.embedding.default:
            what = f"{'position' if is_position else 'token id'} inside {name}"
        guard: Guard | None = "clamp"
        if node.target not in _READS:  # a clamped write would overwrite another row's element
            guard = "redirect" if _kind(ranges, storage_root(tensor)) == "state" else None
        wraps = node.target in _INDEXED and _is_constant(index)  # -1 is the last
        claim = _claim(
            ranges,
            node,
            place,
            what,
            Range(-rows if wraps else sympy.Integer(0), rows - 1),
            guard=guard,
            hazards=("H-9", "H-16") if is_position else (),
        )
        yield dataclasses.replace(claim, subject=tensor, dim=dim)


def _is_constant(index: fx.Node) -> bool:
    """True where an index is a tensor that the graph holds, such as that of `x[:, [-2]]`."""
    while index.op == "call_function" and index.target in _COPIES:
        index = index.args[0]  # type: ignore[assignment]
    return index.op == "get_attr"


def _index_operands(node: fx.Node) -> Iterator[tuple[Place, fx.Node, int]]:
    """(place of an index operand, tensor it indexes, dimension)."""
    args: Any = node.args
    if node.target is _aten.embedding.default:
        yield (1,), args[0], 0
    elif node.target in _INDEXED_DIM:
        yield (2,), args[0], args[1]
    elif node.target in _INDEXED:
        for dim, index in enumerate(args[1]):
            if index is not None and index.meta["val"].dtype != torch.bool:
                yield (1, dim), args[0], dim


_COPIES = (_aten.lift_fresh_copy.default, _aten.lift_fresh.default, _aten._to_copy.default)
_READS = (
    _aten.embedding.default,
    _aten.index.Tensor,
    _aten._unsafe_index.Tensor,
    _aten.gather.default,
    _aten.index_select.default,
)
_INDEXED = (
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_put.default,
    _aten._unsafe_index.Tensor,
    _aten._unsafe_index_put.default,
)
_INDEXED_DIM = (
    _aten.gather.default,
    _aten.index_select.default,
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter_.src,
    _aten.scatter_.value,
    _aten.scatter_add.default,
    _aten.scatter_add_.default,
    _aten.scatter_reduce.two,
    _aten.scatter_reduce_.two,
    _aten.index_add.default,
    _aten.index_add_.default,
    _aten.index_copy.default,
    _aten.index_copy_.default,
    _aten.index_fill_.int_Scalar,
)


# --- attention ---

_CACHE, _SLOT, _ROW, _POSITION, _TABLE = 3, 5, 6, 7, 8  # arguments of paged_attention


def _position_nodes(ranges: Ranges) -> set[fx.Node]:
    """Nodes that are the position of an attention, possibly before views and casts."""
    calls = ranges.gm.graph.find_nodes(
        op="call_function", target=torch.ops.compilespec.paged_attention.default
    )
    return {node.args[_POSITION] for node in calls}


def _attention(ranges: Ranges, node: fx.Node) -> Iterator[Claim]:
    args: Any = node.args
    cache, table = args[_CACHE], args[_TABLE]
    slots = ranges.size(cache, 0) * ranges.size(cache, 1)
    for at, what, needed, hazards in (
        (_SLOT, "slot inside the cache, or -1", Range(sympy.Integer(-1), slots - 1), ()),
        (
            _ROW,
            "row inside the block table, or -1",
            Range(sympy.Integer(-1), ranges.size(table, 0) - 1),
            (),
        ),
        (_POSITION, "position inside the maximum length", integers(0, L - 1), ("H-9", "H-16")),
    ):
        claim = _claim(ranges, node, (at,), what, needed, guard="pad", hazards=hazards)
        yield dataclasses.replace(claim, subject=args[at])
    yield _outside_writes_nothing(ranges, node, "H-9")
    yield _outside_writes_nothing(ranges, node, "H-16")


def _kept_slots(ranges: Ranges, node: fx.Node) -> Claim:
    """Of keys that are written without attention: `write_cache`."""
    args: Any = node.args
    cache = args[2]
    slots = ranges.size(cache, 0) * ranges.size(cache, 1)
    inside = Range(sympy.Integer(-1), slots - 1)
    return _claim(ranges, node, (4,), "slot inside the cache, or -1", inside, guard=None)


# --- recurrent layers ---

# by operator: the arguments state (its rows are what is indexed), row and position
_STATES: dict[Any, tuple[int, int, int]] = {
    torch.ops.compilespec.cached_recurrence.default: (5, 7, 8),
    torch.ops.compilespec.cached_conv.default: (3, 4, 5),
}


def _recurrent_state(ranges: Ranges, node: fx.Node) -> Iterator[Claim]:
    args: Any = node.args
    state, row, position = _STATES[node.target]
    rows = Range(sympy.Integer(-1), ranges.size(args[state], 0) - 1)
    yield _claim(ranges, node, (row,), "row inside the states, or -1", rows, guard=None)
    inside = integers(0, L - 1)
    what = "position inside the maximum length"
    yield _claim(ranges, node, (position,), what, inside, guard=None, hazards=("H-9", "H-16"))


def _outside_writes_nothing(ranges: Ranges, node: fx.Node, hazard: str) -> Claim:
    """Claim that a token outside the row writes nothing: it gets slot -1 and position 0.

    Outside is a wanted position, the value before masks and clamps, that is below 0 (hazard H-9) or
    past the maximum length (H-16).  We assume that it is outside, and derive slot and position.
    """
    args: Any = node.args
    negative = hazard == "H-9"
    outside = Range(-sympy.oo, sympy.Integer(-1)) if negative else Range(L, sympy.oo)
    nothing = integers(-1, -1)
    claim = Claim(
        what=f"a token {'before position 0' if negative else 'past the maximum length'} "
        f"writes nothing",
        node=node,
        place=(_SLOT,),
        needed=nothing,
        holds=True,
        is_guarded=_is_guard(args[_SLOT]),
        guard="pad",
        hazards=(hazard,),
        detail="no token wants to be there",
    )
    for wanted, view in ranges.before_bounds(args[_POSITION]):
        value = ranges.of(wanted)
        if value is None or ranges.sizes.is_empty(ranges.sizes.meet(value, outside)):
            continue
        facts: Facts = {(wanted, view): ranges.sizes.meet(value, outside)}
        slot, position = ranges.given(args[_SLOT], facts), ranges.given(args[_POSITION], facts)
        if slot is not None and ranges.sizes.is_empty(slot):
            continue  # if this one is outside, another one already was
        holds = ranges.within(slot, nothing) and ranges.within(position, integers(0, 0))
        claim = dataclasses.replace(claim, value=slot, holds=holds, subject=wanted, detail="")
        if not holds:
            break
    return claim


def _attention_metadata_is_not_written(ranges: Ranges) -> Claim:
    """H-14: a step never writes attention metadata (slots, rows, positions, block tables), so that
    there is nothing to restore; and it writes only declared buffers.
    """
    graph = ranges.gm.graph
    written = written_roots(graph)
    states = sorted(str(root.meta["role"]) for root in written if _kind(ranges, root) == "state")
    num_caches = sum(_kind(ranges, root) == "cache" for root in written)
    foreign = [
        root
        for root in written
        if root.op == "placeholder" and _kind(ranges, root) not in ("state", "cache")
    ]
    metadata = {
        storage_root(arg)
        for node in graph.find_nodes(
            op="call_function", target=torch.ops.compilespec.paged_attention.default
        )
        for arg in node.args[_SLOT : _TABLE + 1]
        if isinstance(arg, fx.Node)
    }
    output = next(iter(graph.find_nodes(op="output")))
    return Claim(
        what="attention metadata is never written, only declared buffers are",
        node=output,
        needed=integers(0, 0),
        holds=not foreign and not (metadata & written),
        hazards=("H-14",),
        detail=f"written: {', '.join(states) or 'no state'}; {num_caches} caches",
    )


def _kind(ranges: Ranges, node: fx.Node) -> str:
    spec = ranges.inputs.get(str(node.meta.get("role")))
    return spec.kind if spec is not None else ""


# --- state, outputs, arithmetic ---


def _state_writes(ranges: Ranges, node: fx.Node) -> Iterator[Claim]:
    """A step leaves its state rows in the ranges on which the next step relies."""
    for written in _torch_compat.mutated_arguments(node.target):
        buffer: Any = node.args[written]
        if not isinstance(buffer, fx.Node):  # an optional one that is not given
            continue
        root = storage_root(buffer)
        role = str(root.meta.get("role"))
        if role not in CONTRACT or root.op != "placeholder":
            continue
        at = _VALUE_WRITTEN.get(node.target)
        place: Place = () if at is None else (at,)
        yield _claim(
            ranges,
            node,
            place,
            f"what is written to {role}",
            CONTRACT[role],
            guard="clamp" if place else None,
        )


_VALUE_WRITTEN: dict[Any, int] = {
    _aten.index_put_.default: 2,
    _aten.index_copy_.default: 3,
    _aten.copy_.default: 1,
    _aten.scatter_.src: 3,
    torch.ops.compilespec.roll_window.default: 4,
}


def _outputs(ranges: Ranges, node: fx.Node) -> Iterator[Claim]:
    """The outputs that the host reads are token ids or PAD."""
    values: Any = node.args[0]
    for index, name in enumerate(node.meta.get("names", ())):
        if name.startswith("emitted") and V in ranges.sizes.values:
            what = f"output {name} is a token id or PAD"
            yield _claim(ranges, node, (0, index), what, integers(-1, V - 1), guard=None)
        elif isinstance(values[index], fx.Node) and name.startswith("num_emitted"):
            what = f"output {name} counts verified tokens"
            yield _claim(ranges, node, (0, index), what, integers(0, K + 1), guard=None)
        elif isinstance(values[index], fx.Node) and name.startswith("outcome"):
            what, largest = f"output {name} has room for its parts", 1 << 3 * NUM_BITS + 1
            yield _claim(ranges, node, (0, index), what, integers(0, largest), guard=None)


def _arithmetic(ranges: Ranges, node: fx.Node, positions: set[fx.Node]) -> Iterator[Claim]:
    """int32 does not overflow; a position cast to a float stays exact."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return
    if value.dtype == torch.int32 and node.target in _CAN_WRAP:
        exact = ranges.exact(node)
        limits = torch.iinfo(torch.int32)
        needed = integers(limits.min, limits.max)
        yield Claim(
            what="int32 does not overflow",
            node=node,
            value=exact,
            needed=needed,
            holds=ranges.within(exact, needed),
        )
    if node.target is _aten._to_copy.default and value.dtype.is_floating_point:
        source: Any = node.args[0]
        if any(one in positions for one, _ in ranges.cone(source)):
            digits = 1 - int(math.log2(torch.finfo(value.dtype).eps))
            name = str(value.dtype).removeprefix("torch.")
            needed = integers(-(2**digits), 2**digits)
            yield _claim(ranges, node, (0,), f"position is exact in {name}", needed, guard=None)


_CAN_WRAP = (
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.neg.default,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.cumsum.default,
    _aten.cumprod.default,
    _aten._to_copy.default,
)


def _claim(
    ranges: Ranges,
    node: fx.Node,
    place: Place,
    what: str,
    needed: Range,
    *,
    guard: Guard | None,
    hazards: tuple[str, ...] = (),
) -> Claim:
    operand = operand_at(node, place) if place else None
    value = ranges.of(operand)
    return Claim(
        what=what,
        node=node,
        place=place,
        value=value,
        needed=needed,
        holds=ranges.within(value, needed),
        is_guarded=_is_guard(operand),
        guard=guard,
        hazards=hazards,
    )


def _is_guard(operand: Any) -> bool:
    custom = operand.meta.get("custom") or {} if isinstance(operand, fx.Node) else {}
    return bool(custom.get("pass") == GUARD_PASS)


def unguarded(operand: Any) -> Any:
    """The operand before `bound_positions` guarded it."""
    while _is_guard(operand):
        operand = operand.args[1 if operand.target is _aten.where.self else 0]
    return operand
