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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.program import Traced, marker_kind
from compilespec.tracing.structure import shape_of

_NUM_KEYS, _NUM_SPARE = 13, 11  # of a trial; keys behind the last query, which it must not see
_ROWS = (12, 7, 8, 3, 10)  # the queries of a trial
_BATCH = 2
_MOST_CHOICES = 4096
_MOST_NODES = 200
# Operations on a tensor that can as well be done after it was cached.
_COMMUTE = ("float", "double", "to", "type", "transpose", "unsqueeze", "squeeze", "permute")


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
    """The nodes that make the mask, and what they are made of.

    Args:
        length: the size symbol of the tokens.
    """
    made_of_pairs: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if marker_kind(node):
            continue
        if _num_token_dims(node, length) > 1 or made_of_pairs.intersection(node.all_input_nodes):
            made_of_pairs.add(node)
    if mask not in made_of_pairs:
        raise CannotSplit("it has not one dimension of queries and one of keys")
    needed, todo = set[fx.Node](), [mask]
    while todo:
        node = todo.pop()
        if node not in needed and node in made_of_pairs:
            needed.add(node)
            todo += node.all_input_nodes
    if len(needed) > _MOST_NODES:
        raise CannotSplit(f"more than {_MOST_NODES} operations make it")
    nodes = tuple(node for node in gm.graph.nodes if node in needed)
    uses = tuple(
        (node, place)
        for node in nodes
        for place, argument in enumerate(flat_arguments(node))
        if isinstance(argument, fx.Node) and argument not in needed and _is_side(argument, length)
    )
    return Pairs(mask=mask, nodes=nodes, uses=uses)


def flat_arguments(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)  # type: ignore[arg-type]
    return found


def _with_arguments(node: fx.Node, flat: list[Any]) -> tuple[Any, Any]:
    rest = iter(flat)
    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda _: next(rest))  # type: ignore
    return args, kwargs


def _num_token_dims(node: fx.Node, length: str) -> int:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return 0
    return sum(length in _symbols(size) for size in value.shape)


def _symbols(size: object) -> set[str]:
    expression = getattr(getattr(size, "node", None), "expr", None)
    return {str(symbol) for symbol in getattr(expression, "free_symbols", ())}


def _is_side(node: fx.Node, length: str) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, Tensor):
        return _num_token_dims(node, length) == 1
    return length in _symbols(value)


# --- a trial -----------------------------------------------------------------------------


class _Trial:
    """Values for all that a mask is made of, for few tokens, and the mask that they make.

    A side is "all" (the whole mask: queries are the keys), "query" or "key".
    """

    def __init__(self, gm: fx.GraphModule, pairs: Pairs, sizes: Mapping[str, Any], seed: int):
        self._gm, self._pairs, self._length = gm, pairs, str(sizes["length"])
        self._batch = str(sizes["batch"])
        self._random = torch.Generator().manual_seed(seed)
        self._values: dict[tuple[fx.Node, str], Any] = {}

    def whole(self) -> Tensor:
        """The mask as the model computes it, [.., keys, keys]."""
        env: dict[fx.Node, Any] = {}
        for node in self._pairs.nodes:
            env[node] = self._run(node, env, dict.fromkeys(self._pairs.uses, "all"))
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
        alike = near == wanted if near.dtype == torch.bool else torch.isclose(near, wanted)
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
        args, kwargs = _with_arguments(node, flat)
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
            return positions_of(self._gm, node, self._size_of_all)
        shape = [self._size(size, "all") for size in example.shape]
        if example.dtype.is_floating_point:  # all positive: no two scores are both cut to zero
            return self._positive(shape).to(example.dtype)
        return torch.randint(0, 2, shape, generator=self._random).to(example.dtype)

    def _size_of_all(self, size: Any) -> int:
        return self._size(size, "all")

    def _of_side(self, node: fx.Node, whole: Tensor, side: str) -> Tensor:
        """The rows of the trial's queries; or all keys, and as many again with other values."""
        dims = node.meta["example_value"].shape
        dim = next(d for d, size in enumerate(dims) if self._length in _symbols(size))
        if side == "query":
            return whole.index_select(dim, torch.tensor(_ROWS))
        if is_of_positions(node):
            return positions_of(self._gm, node, lambda size: self._size(size, "key"))
        more = list(whole.shape)
        more[dim] = _NUM_SPARE
        return torch.cat([whole, (self._positive(more) * 3).to(whole.dtype)], dim)

    def _positive(self, shape: list[int]) -> Tensor:
        return torch.rand(shape, generator=self._random, dtype=torch.float64) + 0.1

    def _size(self, size: Any, side: str) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        tokens = {"all": _NUM_KEYS, "query": len(_ROWS), "key": _NUM_KEYS + _NUM_SPARE}[side]
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


def _hidden(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask == float("-inf")


# --- positions ---------------------------------------------------------------------------


def is_of_positions(node: fx.Node) -> bool:
    """True where positions and sizes alone make a value."""
    return all(
        source.target is torch.arange
        or source.meta.get("role") in ("position_ids", "symbol")
        or bool(source.all_input_nodes)
        for source in chain(node)
    )


def chain(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is made of, in order, from aranges and placeholders on."""
    found: dict[fx.Node, None] = {}

    def visit(one: fx.Node) -> None:
        if one not in found:
            for source in one.all_input_nodes:
                visit(source)
            found[one] = None

    visit(node)
    return list(found)


def positions_of(gm: fx.GraphModule, node: fx.Node, size: Any) -> Any:
    """The value of a node made of positions, for as many tokens as `size` gives."""
    env: dict[fx.Node, Any] = {}
    for one in chain(node):
        example = one.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            env[one] = size(example)
        elif one.meta.get("role") == "position_ids":
            batch, length = (size(s) for s in example.shape)
            env[one] = torch.arange(length, dtype=example.dtype).expand(batch, length)
        else:
            flat = [
                env[a] if isinstance(a, fx.Node)
                else torch.device("cpu") if isinstance(a, torch.device) else a
                for a in flat_arguments(one)
            ]  # fmt: skip
            args, kwargs = _with_arguments(one, flat)
            if one.op == "call_method":
                env[one] = getattr(args[0], str(one.target))(*args[1:], **kwargs)
            else:
                env[one] = one.target(*args, **kwargs)  # type: ignore[operator]
    return env[node]


# --- the rewriting -----------------------------------------------------------------------


class MaskSplitter:
    """Rewrites what the masks of a graph are made of, in place, so that their keys are those of a
    cache.  Masks of several layers share markers.
    """

    def __init__(self, traced: Traced) -> None:
        self._gm = traced.graph_module
        nodes = self._gm.graph.nodes
        ids = next(n for n in nodes if n.meta.get("role") == "input_ids")
        self._sizes = dict(zip(("batch", "length"), ids.meta["example_value"].shape, strict=True))
        self._length = str(self._sizes["length"])
        self._positions = next((n for n in nodes if n.meta.get("role") == "position_ids"), None)
        # Positions and sizes of all keys are computed before all else.
        self._anchor = next(n for n in nodes if n.op not in ("placeholder", "get_attr"))
        self._all: fx.Node | None = None  # the marker of all positions
        self._cached: dict[fx.Node, fx.Node] = {}  # by what they read, the markers
        self._copies: dict[tuple[fx.Node, str], fx.Node] = {}
        self._done: set[Place] = set()

    @property
    def _graph(self) -> fx.Graph:
        return self._gm.graph

    def split(self, mask: fx.Node) -> None:
        """Raises: CannotSplit."""
        pairs = find_pairs(self._gm, mask, self._length)
        trials = [_Trial(self._gm, pairs, self._sizes, seed) for seed in range(3)]
        candidates = list(itertools.islice(trials[0].solutions(), 8))
        for trial in trials[1:]:
            still = list(trial.solutions())
            candidates = [sides for sides in candidates if sides in still]
        if not candidates:
            raise CannotSplit("no way to compute its rows from cached keys gives the same rows")
        self._rewrite(candidates[0])

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
                flat[place] = self._sided(flat[place], side, node)
            node.args, node.kwargs = _with_arguments(node, flat)

    def _sided(self, source: fx.Node, side: str, reader: fx.Node) -> fx.Node:
        is_size = isinstance(source.meta.get("example_value"), torch.SymInt)
        if side == "query":
            is_own = is_size or not any(one.target is torch.arange for one in chain(source))
            return source if is_own or not is_of_positions(source) else self._own(source)
        if is_size or is_of_positions(source):
            return self._copy(source)
        return self._from_cache(source, reader)

    def _copy(self, node: fx.Node) -> fx.Node:
        """A node of positions or sizes, over all keys."""
        if (node, "key") in self._copies:
            return self._copies[node, "key"]
        if not any(map(self._is_of_tokens, chain(node))):
            return node
        with self._graph.inserting_before(self._anchor):
            made = self._made_of_all(node)
        self._copies[node, "key"] = made
        return made

    def _is_of_tokens(self, node: fx.Node) -> bool:
        """True for what positions and sizes of tokens begin with."""
        role = node.meta.get("role")
        is_length = role == "symbol" and self._length in _symbols(node.meta["example_value"])
        return node.target is torch.arange or role == "position_ids" or is_length

    def _made_of_all(self, node: fx.Node) -> fx.Node:
        role = node.meta.get("role")
        if role == "symbol":
            size = torch.ops.aten.sym_size.int
            return self._describe(self._graph.call_function(size, (self._all_positions(), 0)), node)
        if node.target is torch.arange or role == "position_ids":
            example = node.meta["example_value"]
            made = self._graph.call_method("to", (self._all_positions(), example.dtype))
            if role == "position_ids":  # [T] serves for [B, T]
                self._describe(made, node)
                made = self._graph.call_method("unsqueeze", (made, 0))
            return self._describe(made, node)
        if role is not None:
            raise CannotSplit(f"it depends on {role}")
        flat = [self._copy(a) if isinstance(a, fx.Node) else a for a in flat_arguments(node)]
        args, kwargs = _with_arguments(node, flat)
        return self._describe(self._graph.create_node(node.op, node.target, args, kwargs), node)

    def _all_positions(self) -> fx.Node:
        if self._all is None:
            ids = self._position_ids()
            self._all = self._graph.call_function(torch.ops.compilespec.all_positions, (ids,))
            self._describe(self._all, ids)
            self._all.meta["example_value"] = ids.meta["example_value"][0].to(torch.int64)
        return self._all

    def _own(self, source: fx.Node) -> fx.Node:
        """Values by position, of the step's own tokens: rows of those of all positions."""
        if (source, "query") in self._copies:
            return self._copies[source, "query"]
        shape = source.meta["example_value"].shape
        dim = next(d for d, size in enumerate(shape) if self._length in _symbols(size))
        if len(shape) < 2 or dim == 0 or not isinstance(shape[0], int) or shape[0] != 1:
            raise CannotSplit("its rows have no dimension for the requests of a batch")
        table = self._copy(source)
        with self._graph.inserting_before(self._anchor):
            own = self._graph.call_function(rows_by_position, (table, self._position_ids(), dim))
        self._describe(own, source)
        self._copies[source, "query"] = own
        return own

    def _from_cache(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """The same over all keys of the request: what it is made of is cached."""
        if (source, "key") in self._copies:
            return self._copies[source, "key"]
        if (
            source.op == "call_method"
            and source.target in _COMMUTE
            and len(source.all_input_nodes) == 1
            and _num_token_dims(source.all_input_nodes[0], self._length) == 1
            and not any(isinstance(a, fx.Node) for a in flat_arguments(source)[1:])
        ):
            inner = self._from_cache(source.all_input_nodes[0], source)
            with self._graph.inserting_before(source.next):
                made = self._graph.call_method(
                    str(source.target), (inner, *source.args[1:]), dict(source.kwargs)
                )
            self._describe(made, source)
        else:
            if source not in self._cached:
                shape = source.meta["example_value"].shape
                dim = next(d for d, size in enumerate(shape) if self._length in _symbols(size))
                if dim == 0 or isinstance(shape[0], int):
                    raise CannotSplit("its keys have no dimension for the requests of a batch")
                with self._graph.inserting_before(source.next):
                    self._cached[source] = self._graph.call_function(
                        torch.ops.compilespec.cached, (source, dim)
                    )
                self._describe(self._cached[source], source)
            made = self._cached[source]
        self._copies[source, "key"] = made
        return made

    def _position_ids(self) -> fx.Node:
        if self._positions is None:
            raise CannotSplit("the model takes no position_ids")
        return self._positions

    def _describe(self, made: fx.Node, like: fx.Node) -> fx.Node:
        made.meta = {k: v for k, v in like.meta.items() if k not in ("role", "example")}
        made.meta["custom"] = {"pass": "trace", **(like.meta.get("custom") or {})}
        return made


def rows_by_position(table: Tensor, position_ids: Tensor, dim: int) -> Tensor:
    """Of values by position, [1 or B, .., L, ..], those at [B, S]: [B, .., S, ..]."""
    rows = table.movedim(dim, 0)[:, 0][position_ids.long()]
    return rows.movedim(1, dim)
