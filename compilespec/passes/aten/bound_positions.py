"""Bounds indices, where they are used, that their ranges do not prove to be inside."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from compilespec.passes.graph.nodes import copy_origin
from compilespec.passes.proofs.claims import Claim, Place, find_claims, operand_at
from compilespec.passes.proofs.element_views import dtype_range
from compilespec.passes.proofs.ranges import Ranges
from compilespec.passes.proofs.sizes import L, Range, Sizes
from compilespec.passes.splice.builder import Splice

_aten = torch.ops.aten
_SLOT, _ROW, _POSITION = (5,), (6,), (7,)  # of paged_attention


def bound_positions(step: Splice) -> int:
    """Clamp indices that are read, redirect written rows to the spare row, and make tokens outside
    the sequence write nothing; only where `find_claims` has no proof.  A mask that is proven to
    hide nothing is dropped.

    Returns: operands guarded.  Numerics: exact (values inside pass unchanged).  Runs on ATen.
    """
    sizes = Sizes(step.config, step.config.vocab_size)
    _drop_masks(step.gm, Ranges(step.gm, sizes, step.ctx.inputs, step.ctx.weights))
    tried: set[tuple[fx.Node, str, Place]] = set()
    while True:
        ranges = Ranges(step.gm, sizes, step.ctx.inputs, step.ctx.weights)
        failed: dict[fx.Node, Claim] = {}  # one per node: its guard may settle the others
        for claim in find_claims(ranges):
            if not claim.holds and claim.guard and _key(claim) not in tried:
                failed.setdefault(claim.node, claim)
        if not failed:
            return len(tried)
        guards = _Guards(step.gm, sizes)
        for claim in failed.values():
            tried.add(_key(claim))
            guards.insert(claim)


def _drop_masks(gm: fx.GraphModule, ranges: Ranges) -> None:
    """where(x >= low, kept, ..) is `kept` if no x is less, as the ids of a drafter's vocabulary."""
    for node in list(gm.graph.find_nodes(op="call_function", target=_aten.where.self)):
        condition, kept, _ = node.args
        if condition.target is not _aten.ge.Scalar or not isinstance(kept, fx.Node):
            continue
        subject, low = condition.args
        value, result = kept.meta["val"], node.meta["val"]
        if value.dtype != result.dtype or value.shape != result.shape:
            continue
        most = dtype_range(subject)
        if most is None or not isinstance(low, int):
            continue
        if ranges.within(ranges.of(subject), Range(sympy.Integer(low), most.high)):
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
            if not condition.users:
                gm.graph.erase_node(condition)


def _key(claim: Claim) -> tuple[fx.Node, str, Place]:
    return claim.node, claim.what, claim.place


class _Guards:
    """Inserts guards before their consumers; equal guards of one operand are shared."""

    def __init__(self, gm: fx.GraphModule, sizes: Sizes) -> None:
        self.gm, self.sizes = gm, sizes
        self._made: dict[Any, fx.Node] = {}

    def insert(self, claim: Claim) -> None:
        if claim.guard == "pad" and claim.place != _ROW:
            self._pad(claim)
            return
        operand, (low, high) = operand_at(claim.node, claim.place), self._limits(claim)
        if claim.guard == "clamp":
            new = self._call(claim.node, _aten.clamp.default, operand, low, high)
        else:
            fill = -1 if claim.guard == "pad" else high
            new = self._masked(claim.node, operand, operand, low, high, fill)
        _replace(claim.node, claim.place, new)

    def _pad(self, claim: Claim) -> None:
        """Tokens whose deciding value is outside get slot -1, row -1, position 0 (E5, H-16)."""
        node, subject = claim.node, claim.subject
        places = {_SLOT: -1, _ROW: -1, _POSITION: 0}
        low, high = 0, self.sizes.value(L) - 1
        if subject is operand_at(node, _SLOT):
            low, high = self._limits(claim)
        for place, fill in places.items():
            operand = operand_at(node, place)
            _replace(node, place, self._masked(node, operand, subject, low, high, fill))

    def _masked(
        self, node: fx.Node, operand: Any, subject: Any, low: Any, high: Any, fill: Any
    ) -> fx.Node:
        """`operand` if low <= subject <= high, else `fill`."""
        while subject.meta["val"].dim() < operand.meta["val"].dim():  # [B] for [B, 1]
            subject = self._call(node, _aten.unsqueeze.default, subject, -1)
        above = self._call(node, _aten.ge.Scalar, subject, low)
        below = self._call(node, _aten.le.Scalar, subject, high)
        inside = self._call(node, _aten.bitwise_and.Tensor, above, below)
        other = self._call(
            node,
            _aten.scalar_tensor.default,
            fill,
            dtype=operand.meta["val"].dtype,
            device=operand.meta["val"].device,
        )
        return self._call(node, _aten.where.self, inside, operand, other)

    def _limits(self, claim: Claim) -> tuple[Any, Any]:
        """Both ends as numbers, or as nodes if the dimension varies between calls."""
        low, high = self.sizes.value(claim.needed.low), self.sizes.value(claim.needed.high)
        if not isinstance(high, int):
            size = self._call(claim.node, _aten.sym_size.int, claim.subject, claim.dim)
            high = self._call(claim.node, operator.sub, size, 1)
        return low, high

    def _call(
        self, before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        key = (target, args, tuple(kwargs.items()))
        known = self._made.get(key)
        if known is not None and known < before:
            return known
        with self.gm.graph.inserting_before(before):
            node = self.gm.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg(args, lambda arg: arg.meta["val"])
        with _fake_mode(before):
            node.meta["val"] = target(*values, **kwargs)
        copy_origin(before, node)
        self._made[key] = node
        return node


def _fake_mode(node: fx.Node) -> Any:
    values: list[Any] = [arg.meta.get("val") for arg in node.all_input_nodes]
    return next(value for value in values if isinstance(value, torch.Tensor)).fake_mode  # type: ignore[attr-defined]


def _replace(node: fx.Node, place: Place, new: fx.Node) -> None:
    args: list[Any] = list(node.args)
    if len(place) == 2:
        inner = list(args[place[0]])
        inner[place[1]] = new
        args[place[0]] = inner
    else:
        args[place[0]] = new
    node.args = tuple(args)
