"""Which values of a step's graph are cut among the ranks, as follows from the cuts of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from compilespec.errors import InvalidOption
from compilespec.passes.context import PassContext
from compilespec.passes.graph.nodes import copy_origin
from compilespec.passes.splice.sharding.plan import Cut, Sharding
from compilespec.program import module_path

Edit = Callable[[], None]


@dataclass(frozen=True)
class Shard:
    """The cut of a value, and the weights that this comes from."""

    cut: Cut
    origins: frozenset[str]

    def at(self, dim: int, *others: Shard) -> Shard:
        """The same pieces, of another dimension; of several values, with the weights of all."""
        origins = self.origins.union(*(other.origins for other in others))
        return Shard(replace(self.cut, dim=dim), origins)


Placed = Shard | tuple["Shard | None", ...] | None  # None: every rank has the whole value


class Refused(Exception):
    """An operation that cannot take its operands cut as they are."""

    def __init__(
        self,
        why: str,
        *operands: fx.Node,
        parts: int = 1,
        segments: tuple[int, ...] = (),
    ) -> None:
        """Args: parts, segments: how they could be cut instead; 1: not at all."""
        super().__init__(why)
        self.why, self.operands, self.parts, self.segments = why, operands, parts, segments


class Flow:
    """Places every node of a graph by rules, and decides on weights that nobody decided on.

    Decisions are optimistic: a linear layer is cut until an operation refuses what follows from
    it.  Then its weight is cut less, or not at all, and all is placed anew.
    """

    def __init__(
        self, gm: fx.GraphModule, ctx: PassContext, sharding: Sharding, values: dict[fx.Node, Any]
    ) -> None:
        self.gm, self.ctx, self.sharding, self.values = gm, ctx, sharding, values
        self.placed: dict[fx.Node, Placed] = {}
        self.roots: dict[fx.Node, tuple[str, tuple[int | None, ...]]] = {}
        self.edits: dict[fx.Node, Edit] = {}
        self.best: dict[fx.Node, fx.Node] = {}  # by argmax over ranks: what has its value, too
        self.gathered: set[fx.Node] = set()
        self.whole_uses: set[tuple[fx.Node, fx.Node]] = set()
        self.caches: dict[str, Shard] = {}
        self._ignored: set[fx.Node] = set()  # whole for now: their weights will be cut less
        self._stale: set[fx.Node] = set()  # what follows from them; nothing is decided there
        self._placing: fx.Node | None = None
        self._changed = False

    def run(self, rule_of: Callable[[Flow, fx.Node], Placed]) -> None:
        """Place all nodes.  Raises: InvalidOption for a wish that cannot be met."""
        while True:
            self._changed = False
            for known in (self.placed, self.roots, self.edits, self.caches):
                known.clear()
            self._ignored.clear()
            self._stale.clear()
            for node in self.gm.graph.nodes:
                self._place(node, rule_of)
            if not self._changed:
                return

    # --- what rules ask ---

    def of(self, value: object, user: fx.Node) -> Shard | None:
        """How `user` finds an operand cut."""
        if not isinstance(value, fx.Node) or value in self.gathered or value in self._ignored:
            return None
        placed = None if (value, user) in self.whole_uses else self.placed.get(value)
        return placed if isinstance(placed, Shard) else None

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        """Of the whole value."""
        return tuple(self.values[node].shape)

    def tensors(self, node: fx.Node) -> list[fx.Node]:
        """The operands that are tensors, in order."""
        return [x for x in node.all_input_nodes if isinstance(self.values.get(x), Tensor)]

    def is_head(self, weight: str) -> bool:
        """True where a weight has a row for each id: its values may be gathered."""
        tensor = self.ctx.weights.get(weight)
        return tensor is not None and tensor.dim() > 0 and tensor.shape[0] == self.num_ids

    @property
    def num_ids(self) -> int:
        return self.sharding.vocab_size

    def undecided(self, node: fx.Node) -> str | None:
        """The weight that a node is, as it is or turned, where nobody decided on its cut."""
        root = self.roots.get(node)
        if root is None or root[0] in self.sharding.cuts or self._placing in self._stale:
            return None
        return root[0] if self.sharding.may_cut(root[0]) else None

    def propose(self, node: fx.Node, dim: int, like: Cut | None = None) -> bool:
        """Cut the undecided weight that a node is along a dimension of the node; whether it can be.

        Args: like: the cut of what it meets; None: a piece for each rank.
        """
        weight = self.undecided(node)
        if weight is None:
            return False
        _, dims = self.roots[node]
        of_weight, length = dims[dim], int(self.shape(node)[dim])
        parts = like.parts if like else self.sharding.size
        padded = length if like is None and length == self.num_ids and length % parts else 0
        padded = like.length if like else padded
        lengths = (like.segments if like else ()) or (length,)
        if of_weight is None or not (padded or all(part % parts == 0 for part in lengths)):
            self.keep_whole(weight, f"{length} cannot be cut into {parts} equal parts")
            return False
        cut = Cut(of_weight, parts, like.segments if like else (), padded)
        self.sharding.cuts[weight] = cut
        self.placed[node] = Shard(replace(cut, dim=dim), frozenset({weight}))
        self._changed = self._changed or node.op != "placeholder"
        return True

    # --- what edits do ---

    def hand_on(self, node: fx.Node, new: fx.Node) -> None:
        """Let `new`, made of `node`, be what the others read."""
        node.replace_all_uses_with(new, lambda user: user is not new)
        copy_origin(node, new)
        for key in ("role", "example"):
            if key in node.meta:
                new.meta[key] = node.meta.pop(key)
        new.meta["stands_for"] = node.meta.pop("stands_for", (node.name, None))

    # --- placing ---

    def _place(self, node: fx.Node, rule_of: Callable[[Flow, fx.Node], Placed]) -> None:
        if node.op == "placeholder":
            self._place_input(node)
            return
        self._placing = node
        if any(x in self._ignored or x in self._stale for x in node.all_input_nodes):
            self._stale.add(node)
        for _ in range(len(node.all_input_nodes) + 2):
            try:
                self.edits.pop(node, None)
                self.placed[node] = rule_of(self, node)
                return
            except Refused as refused:
                self._resolve(node, refused)
        raise AssertionError(f"{node.name}: a rule refuses whole operands")

    def _place_input(self, node: fx.Node) -> None:
        name = str(node.meta["role"])
        if self.ctx.inputs[name].kind != "weight":
            return
        self.roots[node] = (name, tuple(range(self.values[node].dim())))
        cut = self.sharding.cuts.get(name)
        if cut is not None:
            self.placed[node] = Shard(cut, frozenset({name}))

    def _resolve(self, node: fx.Node, refused: Refused) -> None:
        """Make operands whole for a node, now; so that they are, the next time."""
        for operand in refused.operands:
            placed = self.of(operand, node)
            if placed is None:
                continue
            self._check_wishes(node, refused, placed)
            if node in self._stale:
                self._ignored.add(operand)
                continue
            is_settled = not placed.origins.isdisjoint(self.sharding.settled)
            if operand.op == "placeholder" and is_settled:
                self.whole_uses.add((operand, node))
            elif operand not in self.roots and all(map(self.is_head, placed.origins)):
                self._gather(operand)
            elif is_settled:
                self.sharding.notes[f"gathered in {self.ctx.key}: {operand.name}"] = refused.why
                self._gather(operand)
            else:
                for weight in placed.origins:
                    self._revise(weight, node, refused)
                self._ignored.add(operand)
                self._stale.add(node)

    def _gather(self, operand: fx.Node) -> None:
        """Gather a value where it was made, so that all that follows has it whole."""
        self._ignored.add(operand)
        while operand.op != "placeholder":
            cut = [x for x in operand.all_input_nodes if isinstance(self.placed.get(x), Shard)]
            if len(cut) != 1 or cut[0] in self.roots:
                break
            operand = cut[0]
        self.gathered.add(operand)
        self._changed = True

    def _revise(self, weight: str, node: fx.Node, refused: Refused) -> None:
        """Change a weight's cut to one that the refused operation allows: each segment cut by
        itself, or fewer parts; where it allows neither, every rank keeps the whole weight.
        """
        cut, self._changed = self.sharding.cuts[weight], True
        if cut is None:
            return
        if refused.segments and not cut.segments:
            self.sharding.cuts[weight] = replace(cut, segments=refused.segments)
        elif 1 < refused.parts < cut.parts:
            self.sharding.cuts[weight] = replace(cut, parts=refused.parts)
        else:
            self.keep_whole(weight, f"{refused.why}, {module_path(node) or node.name}")

    def keep_whole(self, weight: str, why: str) -> None:
        """Every rank has all of a weight."""
        self.sharding.cuts[weight], self._changed = None, True
        self.sharding.why_whole[weight] = why

    def _check_wishes(self, node: fx.Node, refused: Refused, placed: Shard) -> None:
        if refused.segments or refused.parts > 1:
            return
        for weight in placed.origins:
            if self.sharding.way(weight) in ("columns", "rows"):
                raise InvalidOption(
                    f"tensor_parallel_plan: {weight.removeprefix('target.')} cut by "
                    f"{self.sharding.way(weight)} does not fit: {refused.why} (at {node.name}, "
                    f"{module_path(node) or 'top'}); leave it out of the plan, or change it"
                )


def ints(values: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Places and values of those that are numbers."""
    for index, value in enumerate(values):
        if isinstance(value, int) and not isinstance(value, bool):
            yield index, value
