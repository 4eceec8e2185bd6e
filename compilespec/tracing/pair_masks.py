"""Masks that a model computes from pairs of tokens: learned selections, biases, any predicate.

Such a mask is a part of the captured graph: its entries have a query dimension and a key dimension,
both of T tokens.  A step has other queries than keys: the queries are its own tokens, the keys are
all that the cache holds.  `MaskSplitter` finds out which is which, and rewrites what the keys' side
is made of to two markers: `compilespec::cached` (what each token had there) and
`compilespec::all_positions`.  Whose code made the mask does not matter.

Shapes leave few choices; each is tried with numbers: some rows of the whole mask must come out of
the rewritten one, with other keys behind them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.program import Traced, marker_kind
from compilespec.tracing.positions import (
    IN_PLACE,
    ByPosition,
    NotByPosition,
    chain,
    describe,
    flat_arguments,
    is_of_positions,
    is_write,
    num_token_dims,
    positions_of,
    symbols,
    with_arguments,
)
from compilespec.tracing.structure import walk_back

_NUM_KEYS, _NUM_SPARE = 13, 11  # of a trial; keys behind the last query, which it must not see
_ROWS = (12, 7, 8, 3, 10)  # the queries of a trial
_BATCH = 2
_MOST_CHOICES = 4096
_MOST_NODES = 200
# Operations on a tensor that can as well be done after it was cached.
_COMMUTE = ("float", "double", "to", "type", "transpose", "unsqueeze", "squeeze", "permute")
_BY_INDEX = (torch.tril, torch.triu, "tril", "triu")
VIEWS = (
    "view", "reshape", "transpose", "unsqueeze", "squeeze", "expand", "permute", "flatten",
    operator.getitem,
)  # fmt: skip


class CannotSplit(Exception):
    """Why a mask cannot be computed from what a cache holds."""


Place = tuple[fx.Node, int]  # a node, and the number of one of its flat arguments


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The part of a graph that makes a mask, from where both dimensions of tokens meet."""

    mask: fx.Node
    nodes: tuple[fx.Node, ...]  # in order, the mask last
    uses: tuple[Place, ...]  # arguments that have one dimension of tokens, or are a size of them


def find_pairs(gm: fx.GraphModule, mask: fx.Node, length: str) -> Pairs:
    """The nodes that make the mask, of which none writes in place, and what they are made of.

    Args:
        length: the size symbol of the tokens.
    """
    made = made_of_pairs(gm, length)
    if mask not in made:
        raise CannotSplit("it has not one dimension of queries and one of keys")
    pairs = pairs_behind(gm, mask, made, length)
    if len(pairs.nodes) > _MOST_NODES:
        raise CannotSplit(f"more than {_MOST_NODES} operations make it")
    return pairs


def pairs_behind(gm: fx.GraphModule, mask: fx.Node, made: set[fx.Node], length: str) -> Pairs:
    """Those of the nodes `made` that make the mask, and what they are made of."""
    needed = walk_back(mask, made.__contains__)
    nodes = tuple(node for node in gm.graph.nodes if node in needed)
    return Pairs(mask=mask, nodes=nodes, uses=_side_uses(nodes, length))


def _side_uses(nodes: Sequence[fx.Node], length: str) -> tuple[Place, ...]:
    """Arguments of the nodes that have one dimension of tokens, or are a size of them."""
    return tuple(
        (node, place)
        for node in nodes
        for place, argument in enumerate(flat_arguments(node))
        if isinstance(argument, fx.Node) and argument not in nodes and _is_side(argument, length)
    )


def made_of_pairs(gm: fx.GraphModule, length: str) -> set[fx.Node]:
    """Nodes with two dimensions of tokens, and what is made of them outside of attention."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if marker_kind(node):
            continue
        if num_token_dims(node, length) > 1 or found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def end_writes(gm: fx.GraphModule, nodes: set[fx.Node]) -> None:
    """Let each in-place operation on one of the nodes give a new tensor, which what follows reads.

    Raises: CannotSplit where other nodes share the memory that is written.
    """
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    for node in [n for n in gm.graph.nodes if n in nodes]:
        if not is_write(node):
            continue
        if node.target is operator.setitem:
            raise CannotSplit(f"a part of it is written in place ({node.name})")
        name = str(node.target)
        node.target = IN_PLACE.get(node.target, node.target)
        written: Any = node.args[0]
        if written.target in VIEWS or any(
            user.target in VIEWS and order[user] < order[node] for user in written.users
        ):
            raise CannotSplit(f"a view of it is written in place ({node.name})")
        if node.op == "call_method":
            node.target = name.removesuffix("_")
        if "example_value" not in node.meta:
            node.meta["example_value"] = written.meta["example_value"]
        for user in [u for u in written.users if order[u] > order[node]]:
            user.replace_input_with(written, node)


def _is_side(node: fx.Node, length: str) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, Tensor):
        return num_token_dims(node, length) == 1
    return length in symbols(value)


# --- a trial -----------------------------------------------------------------------------


class Trial:
    """Values for all that a mask is made of, for few tokens, and the mask that they make.

    A side is "all" (the whole mask: queries are the keys), "query" or "key".
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        pairs: Pairs,
        sizes: Mapping[str, Any],
        seed: int,
        num_keys: int = _NUM_KEYS,
    ) -> None:
        self._weights, self._pairs, self._length = weights, pairs, str(sizes["length"])
        self._batch, self._num_keys = str(sizes["batch"]), num_keys
        self._random = torch.Generator().manual_seed(seed)
        self._values: dict[tuple[fx.Node, str], Any] = {}

    def shape_of(self, node: fx.Node) -> list[int]:
        """The shape of a node in the whole mask."""
        return [self._size_of_all(size) for size in node.meta["example_value"].shape]

    def whole(self, known: Mapping[fx.Node, Tensor] | None = None) -> Tensor:
        """The mask as the model computes it, [.., keys, keys].

        Args:
            known: values of nodes that are not computed.
        """
        env: dict[fx.Node, Any] = dict(known or {})
        for node in self._pairs.nodes:
            try:
                env[node] = self._run(node, env, dict.fromkeys(self._pairs.uses, "all"))
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                why = str(error).splitlines()[0]
                raise CannotSplit(f"{node.name} cannot be computed by itself ({why})") from None
        return visible(env[self._pairs.mask])

    def solutions(self) -> Iterator[dict[Place, str]]:
        """Sides of all uses with which rows of the whole mask come out."""
        whole = self.whole()
        later = torch.ones(_NUM_KEYS, _NUM_KEYS, dtype=torch.bool).triu(1)
        if not bool(_hidden(whole)[..., later].all()):
            raise CannotSplit("tokens see later ones")
        count = itertools.count()
        for sides, mask in self._search(0, {}, {}, count):
            if self._agrees(visible(mask), whole):
                yield sides

    def _search(
        self, index: int, env: dict[fx.Node, Any], sides: dict[Place, str], count: Iterator[int]
    ) -> Iterator[tuple[dict[Place, str], Tensor]]:
        if index == len(self._pairs.nodes):
            yield dict(sides), env[self._pairs.mask]
            return
        node = self._pairs.nodes[index]
        mine = [use for use in self._pairs.uses if use[0] is node]
        for choice in itertools.product(("key", "query"), repeat=len(mine)):
            if next(count) > _MOST_CHOICES:
                raise CannotSplit("too many ways to tell queries from keys")
            now = {**sides, **dict(zip(mine, choice, strict=True))}
            try:
                value = self._run(node, env, now)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue
            yield from self._search(index + 1, {**env, node: value}, now, count)

    def _agrees(self, mask: Tensor, whole: Tensor) -> bool:
        num_all = _NUM_KEYS + _NUM_SPARE
        if mask.dim() < 2 or mask.shape[-1] != num_all or mask.shape[-2] not in (1, len(_ROWS)):
            return False
        if mask.dim() != whole.dim() or mask.dtype != whole.dtype:
            return False
        rows = torch.tensor(_ROWS)
        try:
            wanted = whole.expand(*whole.shape[:-2], _NUM_KEYS, _NUM_KEYS).index_select(-2, rows)
            got = mask.expand(*mask.shape[:-2], len(_ROWS), num_all)
            torch.broadcast_shapes(wanted.shape, got[..., :_NUM_KEYS].shape)
        except RuntimeError:
            return False
        near = got[..., :_NUM_KEYS]
        alike = near == wanted if near.dtype == torch.bool else _isclose(near, wanted)
        return bool(_hidden(got[..., _NUM_KEYS:]).all()) and bool(alike.all())

    def _run(self, node: fx.Node, env: Mapping[fx.Node, Any], sides: Mapping[Place, str]) -> Any:
        flat = [
            (env[argument].clone() if isinstance(env[argument], Tensor) else env[argument])
            if argument in env
            else self._value(argument, sides.get((node, place), "all"))
            if isinstance(argument, fx.Node)
            else torch.device("cpu")
            if isinstance(argument, torch.device)
            else argument
            for place, argument in enumerate(flat_arguments(node))
        ]
        args, kwargs = with_arguments(node, flat)
        if node.op == "call_method":
            owner, *rest = args
            return getattr(owner, str(node.target))(*rest, **kwargs)
        if node.op != "call_function":
            raise CannotSplit(f"{node.op} {node.target}")
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _value(self, node: fx.Node, side: str) -> Any:
        if (node, side) not in self._values:
            self._values[node, side] = self._make(node, side)
        return self._values[node, side]

    def _make(self, node: fx.Node, side: str) -> Any:
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            return self._size(example, side)
        if not isinstance(example, Tensor):
            raise CannotSplit(f"{node.name} has no known value")
        if side != "all":
            return self._of_side(node, self._value(node, "all"), side)
        if is_of_positions(node):
            return positions_of(node, self._size_of_all, self._weights)
        shape = [self._size(size, "all") for size in example.shape]
        if example.dtype.is_floating_point:  # all positive: no two scores are both cut to zero
            return self._positive(shape).to(example.dtype)
        return torch.randint(0, 2, shape, generator=self._random).to(example.dtype)

    def _size_of_all(self, size: Any) -> int:
        return self._size(size, "all")

    def _of_side(self, node: fx.Node, whole: Tensor, side: str) -> Tensor:
        """The rows of the trial's queries; or all keys, and as many again with other values."""
        dims = node.meta["example_value"].shape
        dim = next(d for d, size in enumerate(dims) if self._length in symbols(size))
        if side == "query":
            if str(dims[dim]) != self._length:
                raise ValueError("its entries are not those of tokens")
            return whole.index_select(dim, torch.tensor(_ROWS))
        if is_of_positions(node):
            return positions_of(node, lambda size: self._size(size, "key"), self._weights)
        more = list(whole.shape)
        more[dim] = self._size(dims[dim], "key") - whole.shape[dim]
        return torch.cat([whole, (self._positive(more) * 3).to(whole.dtype)], dim)

    def _positive(self, shape: list[int]) -> Tensor:
        return torch.rand(shape, generator=self._random, dtype=torch.float64) + 0.1

    def _size(self, size: Any, side: str) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        tokens = {"all": self._num_keys, "query": len(_ROWS), "key": _NUM_KEYS + _NUM_SPARE}[side]
        expression = _torch_compat.size_expression(size)
        values = {
            symbol: tokens if str(symbol) == self._length else _BATCH
            for symbol in expression.free_symbols
        }
        return int(expression.subs(values))


def visible(mask: Tensor) -> Tensor:
    """A mask with -inf for all that counts as hidden, where it is added to scores."""
    if not mask.is_floating_point():
        return mask.bool() if mask.dtype != torch.bool else mask
    return mask.masked_fill(mask < -1e4, float("-inf"))


def _isclose(near: Tensor, wanted: Tensor) -> Tensor:
    """Equal numbers; in wide dtypes, up to one that is added to a whole row: softmax leaves it out
    (MPT counts distances from the last key).
    """
    if near.dtype in (torch.float32, torch.float64):
        near, wanted = (x - x.amax(-1, keepdim=True) for x in (near, wanted))
    return torch.isclose(near, wanted)


def _hidden(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask == float("-inf")


# --- the rewriting -----------------------------------------------------------------------


class MaskSplitter:
    """Rewrites what the masks of a graph are made of, in place, so that their keys are those of a
    cache.  Masks of several layers share markers.
    """

    def __init__(self, traced: Traced) -> None:
        self._gm, self._weights = traced.graph_module, traced.weights
        self._values = ByPosition(traced)
        self._length = str(self._values.length)
        self._keys: dict[fx.Node, fx.Node] = {}  # what keys are made of, from the cache
        self._done: set[Place] = set()

    @property
    def _graph(self) -> fx.Graph:
        return self._gm.graph

    def split(self, mask: fx.Node) -> None:
        """Raises: CannotSplit."""
        pairs = find_pairs(self._gm, mask, self._length)
        sizes = {"batch": self._values.batch, "length": self._values.length}
        trials = [Trial(self._weights, pairs, sizes, seed) for seed in range(3)]
        candidates = list(itertools.islice(trials[0].solutions(), 8))
        for trial in trials[1:]:
            still = list(trial.solutions())
            candidates = [sides for sides in candidates if sides in still]
        if not candidates:
            by_index = [node.name for node in pairs.nodes if node.target in _BY_INDEX]
            raise CannotSplit(
                "no way to compute its rows from cached keys gives the same rows"
                + (f" ({by_index[0]} counts rows from the first of a call)" if by_index else "")
            )
        try:
            self._rewrite(candidates[0])
        except NotByPosition as error:
            raise CannotSplit(str(error)) from None

    def _rewrite(self, sides: Mapping[Place, str]) -> None:
        by_node: dict[fx.Node, dict[int, str]] = {}
        for (node, place), side in sides.items():
            if (node, place) in self._done:  # a part of another mask, too
                continue
            self._done.add((node, place))
            by_node.setdefault(node, {})[place] = side
        for node, places in by_node.items():
            flat = flat_arguments(node)
            for place, side in places.items():
                flat[place] = self._sided(flat[place], side)
            node.args, node.kwargs = with_arguments(node, flat)

    def _sided(self, source: fx.Node, side: str) -> fx.Node:
        example = source.meta.get("example_value")
        is_size = isinstance(example, torch.SymInt)
        is_integer = isinstance(example, Tensor) and not example.is_floating_point()
        if is_integer and not is_of_positions(source):
            raise CannotSplit(f"it depends on the token ids ({source.name})")
        if side == "query":
            counts = not is_size and is_of_positions(source)
            counts = counts and any(map(self._values.is_count, chain(source)))
            return self._values.own(source) if counts else source
        if is_size or is_of_positions(source):
            return self._values.over_all(source)
        return self._from_cache(source)

    def _from_cache(self, source: fx.Node) -> fx.Node:
        """The same over all keys of the request: what it is made of is cached."""
        if num_token_dims(source, self._length) == 0 or is_of_positions(source):
            return self._values.over_all(source)
        if source not in self._keys:
            is_behind = self._is_of_several(source) or self._commutes(source)
            self._keys[source] = self._behind_cache(source) if is_behind else self._marker(source)
        return self._keys[source]

    def _is_of_several(self, source: fx.Node) -> bool:
        """True for entries of several tokens each, such as blocks of keys."""
        shape = source.meta["example_value"].shape
        return str(shape[self._values.token_dim(source)]) != self._length

    def _commutes(self, source: fx.Node) -> bool:
        inner = source.all_input_nodes
        is_simple = source.op == "call_method" and source.target in _COMMUTE and len(inner) == 1
        return is_simple and num_token_dims(inner[0], self._length) == 1

    def _behind_cache(self, source: fx.Node) -> fx.Node:
        flat = [
            self._values.over_all(a)
            if isinstance(a, fx.Node) and isinstance(a.meta.get("example_value"), torch.SymInt)
            else self._from_cache(a)
            if isinstance(a, fx.Node)
            else a
            for a in flat_arguments(source)
        ]
        args, kwargs = with_arguments(source, flat)
        with self._graph.inserting_before(source.next):
            return describe(self._graph.create_node(source.op, source.target, args, kwargs), source)

    def _marker(self, source: fx.Node) -> fx.Node:
        dim = self._values.token_dim(source)
        if dim == 0 or source.meta["example_value"].shape[0] != self._values.batch:
            raise CannotSplit("its keys have no dimension for the requests of a batch")
        with self._graph.inserting_before(source.next):
            marker = self._graph.call_function(torch.ops.compilespec.cached, (source, dim))
        return describe(marker, source)
