"""Makes the positions of a captured graph those of the step's tokens, wherever a model counts them.

A step has other tokens than a whole text: what a model counts itself (`torch.arange` over its
tokens) would begin at 0 in every call.  Values that follow from such counts are computed for all
positions, and the tokens of a step read theirs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec import _torch_compat
from compilespec.errors import NoPositionInput, UnsupportedModel
from compilespec.program import (
    LONG_ROPE,
    MIXERS,
    ROPE_OFFSETS,
    Traced,
    TracedInput,
    marker_kind,
    module_path,
)
from compilespec.tracing.naming import source_line
from compilespec.tracing.quantized_weights import is_quantized
from compilespec.tracing.structure import ancestors, token_ids


def first_position(model: nn.Module) -> int:
    """The position that a model of transformers gives the first token if it is told none.

    RoBERTa and its relatives count from `padding_idx` + 1.
    """
    for module in model.modules():
        count = getattr(module, "create_position_ids_from_input_ids", None)
        padding = getattr(module, "padding_idx", None)
        if count is not None and isinstance(padding, int):
            ids = torch.full((1, 1), padding + 1)
            return int(count(ids, padding)[0, 0])
    return 0


_ELEMENTWISE = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.isub,
    operator.imul, operator.itruediv, torch.add, torch.sub, torch.mul, torch.div, torch.where,
    "add", "sub", "mul", "div",
)  # fmt: skip
IN_PLACE: Mapping[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_LENGTHS = (7, 12)  # tokens of a trial of a count
_OWN = (3, 5)  # the first positions of a trial's requests, of `_NUM_OWN` tokens each
_NUM_OWN = 3
_OF_REQUESTS = ("input_ids", ROPE_OFFSETS, LONG_ROPE)  # inputs that requests differ in


class NotByPosition(Exception):
    """Why a value cannot be read by position."""


class ByPosition:
    """Computes values of a captured graph for all positions, and reads them by position."""

    def __init__(self, traced: Traced) -> None:
        self._graph, self._weights = traced.graph_module.graph, traced.weights
        nodes = self._graph.nodes
        ids = token_ids(self._graph)
        self.batch, self.length = ids.meta["example_value"].shape
        self._positions = next((n for n in nodes if n.meta.get("role") == "position_ids"), None)
        # Values of all positions are computed before all else.
        self._anchor = next(n for n in nodes if n.op not in ("placeholder", "get_attr"))
        self._all: fx.Node | None = None  # the marker of all positions
        self._over_all: dict[fx.Node, fx.Node] = {}
        self._own: dict[fx.Node, fx.Node] = {}

    def over_all(self, node: fx.Node) -> fx.Node:
        """A node of positions or sizes, for all positions instead of the call's tokens.

        Raises: NotByPosition.
        """
        if node in self._over_all:
            return self._over_all[node]
        if node.op in ("placeholder", "get_attr") and not self._is_of_tokens(node):
            return node
        with self._graph.inserting_before(self._anchor):
            made = self._made_of_all(node)
        self._over_all[node] = made
        return made

    def own(self, node: fx.Node) -> fx.Node:
        """A node of positions, for the step's own tokens: rows of that of all positions.

        Raises: NotByPosition.
        """
        if node not in self._own:
            shape = node.meta["example_value"].shape
            dim = self.token_dim(node)
            if not dim or shape[0] not in (1, self.batch):
                raise NotByPosition("its rows have no dimension for the requests of a batch")
            self._check_rows(node, dim)
            table = self.over_all(node)
            with self._graph.inserting_before(self._anchor):
                own = self._graph.call_function(rows_by_position, (table, self.position_ids(), dim))
            self._own[node] = describe(own, node)
        return self._own[node]

    def own_of_all(self, node: fx.Node) -> fx.Node:
        """[B, ..] of a node [..] without a dimension for requests.

        Raises: NotByPosition.
        """
        dim = self.token_dim(node)
        self._check_rows(node, dim)
        table = self.over_all(node)
        with self._graph.inserting_before(self._anchor):
            table = describe(self._graph.call_method("unsqueeze", (table, 0)), node)
            arguments = (table, self.position_ids(), dim + 1)
            return describe(self._graph.call_function(rows_by_position, arguments), node)

    def _check_rows(self, node: fx.Node, dim: int) -> None:
        """Raises: NotByPosition where a token's row differs with the number of tokens."""
        few, many = (value_of(node, self.sizes(n), self._weights) for n in _LENGTHS)
        if few is None or many is None:
            return
        if few.shape[dim] != _LENGTHS[0] or not _alike(few, many.narrow(dim, 0, _LENGTHS[0])):
            raise NotByPosition("it depends on how many tokens a call has, not on positions alone")

    def sizes(self, length: int, batch: int = 2) -> Any:
        """A function that gives a size for a number of tokens and of requests."""
        values = {str(self.length): length, str(self.batch): batch}

        def size(value: Any) -> int:
            if not isinstance(value, torch.SymInt):
                return int(value)
            expression = _torch_compat.size_expression(value)
            return int(expression.subs({s: values[str(s)] for s in expression.free_symbols}))

        return size

    def token_dim(self, node: fx.Node) -> int:
        """The first dimension that follows from the number of tokens."""
        shape = node.meta["example_value"].shape
        return next(d for d, size in enumerate(shape) if str(self.length) in symbols(size))

    def position_ids(self) -> fx.Node:
        if self._positions is None:
            raise NotByPosition("the model takes no position_ids")
        return self._positions

    def _is_of_tokens(self, node: fx.Node) -> bool:
        """True for what positions and sizes of tokens begin with."""
        role = node.meta.get("role")
        is_length = role == "symbol" and str(self.length) == str(node.meta["example_value"])
        return self.is_count(node) or role == "position_ids" or is_length

    def is_count(self, node: fx.Node) -> bool:
        """True for `torch.arange` over the tokens of a call, from 0."""
        return _is_count(node, str(self.length))

    def _made_of_all(self, node: fx.Node) -> fx.Node:
        role, graph = node.meta.get("role"), self._graph
        if role == "symbol":
            size = torch.ops.aten.sym_size.int
            return describe(graph.call_function(size, (self._all_positions(), 0)), node)
        if self.is_count(node) or role == "position_ids":
            dtype = node.meta["example_value"].dtype
            made = describe(graph.call_method("to", (self._all_positions(), dtype)), node)
            if role == "position_ids":  # [1, L] serves for [B, L]
                made = describe(graph.call_method("unsqueeze", (made, 0)), node)
            return made
        if role in _OF_REQUESTS:
            raise NotByPosition(f"it depends on {role}")
        flat = [self.over_all(a) if isinstance(a, fx.Node) else a for a in flat_arguments(node)]
        args, kwargs = with_arguments(node, flat)
        return describe(graph.create_node(node.op, node.target, args, kwargs), node)

    def _all_positions(self) -> fx.Node:
        if self._all is None:
            ids = self.position_ids()
            marker = torch.ops.compilespec.all_positions
            self._all = describe(self._graph.call_function(marker, (ids,)), ids)
            self._all.meta["example_value"] = ids.meta["example_value"][0].to(torch.int64)
        return self._all


def _is_count(node: fx.Node, length: str) -> bool:
    if node.target is not torch.arange or _sizes(node) != [length]:
        return False
    begin = node.kwargs.get("start", node.args[0] if len(node.args) > 1 else 0)
    step = node.kwargs.get("step", node.args[2] if len(node.args) > 2 else 1)
    return bool(begin == 0 and step == 1)


def rows_by_position(table: Tensor, position_ids: Tensor, dim: int) -> Tensor:
    """Of values by position, [1 or B, .., L, ..], those at [B, S]: [B, .., S, ..]."""
    rows = table.movedim(dim, 0)[:, 0][position_ids.long()]
    return rows.movedim(1, dim)


def positions_of(
    node: fx.Node,
    size: Any,
    weights: Mapping[str, Tensor],
    known: Mapping[fx.Node, fx.Node | Tensor] | None = None,
) -> Any:
    """The value of a node made of positions, for as many tokens as `size` gives.

    Args:
        known: values of nodes, or other nodes whose values they have.
    """
    env: dict[fx.Node, Any] = {}
    for one in chain(node):
        example: Any = one.meta.get("example_value")
        if known and one in known:
            value = known[one]
            env[one] = env[value] if isinstance(value, fx.Node) else value.clone()
        elif isinstance(example, torch.SymInt):
            env[one] = size(example)
        elif one.op == "placeholder" and one.meta.get("role") in weights:
            env[one] = weights[one.meta["role"]]
        elif one.meta.get("role") == "position_ids":
            batch, length = (size(s) for s in example.shape)
            env[one] = torch.arange(length, dtype=example.dtype).expand(batch, length)
        else:
            flat = [
                env[a] if isinstance(a, fx.Node)
                else torch.device("cpu") if isinstance(a, torch.device) else a
                for a in flat_arguments(one)
            ]  # fmt: skip
            args, kwargs = with_arguments(one, flat)
            if one.op == "call_method":
                env[one] = getattr(args[0], str(one.target))(*args[1:], **kwargs)
            else:
                env[one] = one.target(*args, **kwargs)  # type: ignore[operator]
    return env[node]


def value_of(
    node: fx.Node,
    size: Any,
    weights: Mapping[str, Tensor],
    known: Mapping[fx.Node, fx.Node | Tensor] | None = None,
) -> Tensor | None:
    """The same on the CPU; None where its weights have no values, or are not plain tensors.

    Raises: NotByPosition where it cannot be computed for such sizes.
    """
    roles = {one.meta.get("role") for one in chain(node)}
    needed = {role: weight for role, weight in weights.items() if role in roles}
    if any(is_quantized(weight) or weight.is_meta for weight in needed.values()):
        return None
    try:
        found = positions_of(node, size, {role: w.cpu() for role, w in needed.items()}, known)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise NotByPosition(f"it cannot be computed for the tokens of a step ({why})") from None
    return found if isinstance(found, Tensor) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    return torch.allclose(one, other, equal_nan=True)


def is_write(node: fx.Node) -> bool:
    """True for what writes its first argument in place."""
    name = str(node.target)
    is_method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    return is_method or node.target in IN_PLACE or node.target is operator.setitem


def is_of_positions(node: fx.Node) -> bool:
    """True where positions, sizes and weights alone make a value."""
    seen, todo = {node}, [node]
    while todo:
        one = todo.pop()
        of_requests = one.meta.get("role") in _OF_REQUESTS
        if of_requests or marker_kind(one) in (*MIXERS, "cached"):
            return False
        new = [source for source in one.all_input_nodes if source not in seen]
        seen.update(new)
        todo += new
    return True


def chain(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is made of, in order."""
    found: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        missing = [source for source in todo[-1].all_input_nodes if source not in found]
        if missing:
            todo += missing
        else:
            found[todo.pop()] = None
    return list(found)


def flat_arguments(node: fx.Node) -> list[Any]:
    """The leaves of a node's arguments, in order."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found


def with_arguments(node: fx.Node, flat: list[Any]) -> tuple[Any, Any]:
    """Arguments of the same structure with these leaves."""
    rest = iter(flat)
    found: Any = fx.node.map_aggregate((node.args, node.kwargs), lambda _: next(rest))
    return found[0], found[1]


def symbols(size: object) -> set[str]:
    """The names of the symbols that a size is made of."""
    expression = getattr(getattr(size, "node", None), "expr", None)
    return {str(symbol) for symbol in getattr(expression, "free_symbols", ())}


def num_token_dims(node: fx.Node, length: str) -> int:
    """Dimensions of a tensor that follow from the number of tokens."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return 0
    return sum(length in symbols(size) for size in value.shape)


def describe(made: fx.Node, like: fx.Node) -> fx.Node:
    """Give a new node the shape and the origin of another one."""
    made.meta = {k: v for k, v in like.meta.items() if k not in ("role", "example")}
    made.meta["custom"] = {"pass": "trace", **(like.meta.get("custom") or {})}
    return made


def _counts_of_tokens(gm: fx.GraphModule) -> list[fx.Node]:
    """The aranges over the token dimension from which the logits are computed."""
    ids = token_ids(gm.graph)
    length, reached = str(ids.meta["example_value"].shape[1]), ancestors(gm.graph.output_node())
    return [
        node
        for node in gm.graph.find_nodes(op="call_function", target=torch.arange)
        if str(node.meta["example_value"].shape[0]) == length and node in reached
    ]


def settle_counts(traced: Traced, model: nn.Module) -> Traced:
    """Let values that follow from a model's own count of its tokens follow from the positions.

    Raises: UnsupportedModel that names the place of a count for which there is no such value.
    """
    gm, values = traced.graph_module, ByPosition(traced)
    for count in _counts_of_tokens(gm):
        try:
            try:
                _settle(gm, count, values, _is_counted)
            except NotByPosition:  # rows of a table may have the dimension that positions lack
                _settle(gm, count, values, is_of_positions)
        except NotByPosition as error:
            raise UnsupportedModel(
                f"{type(model).__name__}: {module_path(count) or 'the model'} counts the tokens of "
                f"a call by torch.arange, besides position_ids; {source_line(count)}: expected "
                f"every position to come from position_ids ({error}); switch that off in the "
                "config, or use position_ids there"
            ) from None
        for node in reversed(_users_of_count(gm, count, is_of_positions)):
            if not node.users:
                gm.graph.erase_node(node)
    gm.recompile()
    return traced


def _settle(
    gm: fx.GraphModule, count: fx.Node, values: ByPosition, is_inside: Callable[[fx.Node], bool]
) -> None:
    """Let what reads values made of a count read rows by position.  Raises: NotByPosition."""
    made = _users_of_count(gm, count, is_inside)
    readers = {node: [user for user in node.users if not is_inside(user)] for node in made}
    own = {node: values.own(node) for node, users in readers.items() if users}
    for node, new in own.items():
        for user in readers[node]:
            user.replace_input_with(node, new)


def _is_counted(node: fx.Node) -> bool:
    """True where positions and sizes alone make a value, without weights."""
    known = ("position_ids", "symbol")
    return is_of_positions(node) and all(
        source.op != "placeholder" or source.meta.get("role") in known for source in chain(node)
    )


def _users_of_count(
    gm: fx.GraphModule, count: fx.Node, is_inside: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """A count and all that is made of it and of positions alone, in order."""
    found = {count}
    for node in gm.graph.nodes:
        reads = found.intersection(node.all_input_nodes) and not _reads_dtype_alone(node)
        if reads and is_inside(node):
            found.add(node)
    return [node for node in gm.graph.nodes if node in found]


def _reads_dtype_alone(node: fx.Node) -> bool:
    """True for `positions.new_ones(())` and the like, where transformers' mask makers begin."""
    value = node.meta.get("example_value")
    is_scalar = isinstance(value, Tensor) and value.dim() == 0
    return is_scalar and node.op == "call_method" and str(node.target).startswith("new_")


def take_positions(traced: Traced) -> Traced:
    """Give a graph the argument `position_ids`, if no module takes it; nothing reads it yet."""
    gm = traced.graph_module
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    ids = token_ids(gm.graph)
    with gm.graph.inserting_after(placeholders[-1]):
        positions = gm.graph.placeholder("position_ids")
    positions.meta = {
        "role": "position_ids",
        "example_value": ids.meta["example_value"],
        "custom": {"pass": "trace"},
    }
    inputs = (*traced.inputs, TracedInput(name="position_ids", kind="argument"))
    return dataclasses.replace(traced, inputs=inputs)


def count_by_position(traced: Traced, model: nn.Module) -> Traced:
    """Replace aranges over the token dimension by the positions, if no module takes positions."""
    gm = traced.graph_module
    over_tokens = _counts_of_tokens(gm)
    positions = next(n for n in gm.graph.nodes if n.meta.get("role") == "position_ids")
    batch, length = map(str, positions.meta["example_value"].shape)
    if not over_tokens and not positions.users and not traced.num_recurrent_markers:
        raise NoPositionInput(
            f"{type(model).__name__}.forward takes no position_ids and computes no torch.arange "
            "over its tokens, so its positions cannot be set; add a position_ids argument"
        )
    counts = [
        node
        for node in over_tokens
        if _is_count(node, length)
        and not any(
            batch in _sizes(user) or (len(_sizes(user)) > 3 and length in _sizes(user)[2:])
            for user in _users_of_count(gm, node, is_of_positions)
        )
    ]
    ends = _CountEnds(traced, counts)
    for node in counts:
        try:
            ends.check(node)
        except NotByPosition as error:
            raise UnsupportedModel(
                f"{type(model).__name__}: {module_path(node) or 'the model'} counts the tokens of "
                f"a call by torch.arange; {source_line(node)}: expected each value that follows "
                f"to be of a token's position ({error}); add a position_ids argument to forward"
            ) from None
    for node in counts:
        # [B, T] replaces [T]; broadcasting over a leading batch dimension works as before.
        with gm.graph.inserting_before(node):
            value = gm.graph.call_method("to", (positions, node.meta["example_value"].dtype))
        value.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        _drop_leading_ones(node, value)
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    return settle_counts(traced, model)


class _CountEnds:
    """Where values that follow from counts meet others; what they are once counts are positions."""

    def __init__(self, traced: Traced, counts: list[fx.Node]) -> None:
        self._gm, self._weights = traced.graph_module, traced.weights
        self._values = ByPosition(traced)
        self._positions = torch.tensor([[first + n for n in range(_NUM_OWN)] for first in _OWN])
        self._known: dict[fx.Node, fx.Node | Tensor] = {}
        for count in counts:
            self._known[count] = self._positions.to(count.meta["example_value"].dtype)
            self._known.update(_without_leading_ones(count, count))

    def check(self, count: fx.Node) -> None:
        """Let what meets values of the batch have its dimensions, in place.

        Raises: NotByPosition where a token's value would not be that of its position.
        """
        made = {count}
        for node in self._gm.graph.nodes:
            is_tensor = isinstance(node.meta.get("example_value"), Tensor)
            if is_tensor and made.intersection(node.all_input_nodes) and is_of_positions(node):
                made.add(node)
        ordered = [node for node in self._gm.graph.nodes if node in made]
        for node in ordered:
            if writes := [user for user in node.users if is_write(user) and user.args[0] is node]:
                raise NotByPosition(f"{writes[0].name} writes {node.name} in place")
            users = [user for user in node.users if user not in made]
            if users:
                self._check_end(node, users)
        for node in reversed(ordered[1:]):
            if not node.users:
                self._gm.graph.erase_node(node)

    def _check_end(self, node: fx.Node, users: list[fx.Node]) -> None:
        try:
            has_batch = self._is_own(node)
        except NotByPosition:
            if node.meta["example_value"].shape[0] in (1, self._values.batch):
                raise
            own = self._values.own_of_all(node)  # raises where it is not by position either
            for user in users:
                self._align(node, user, own)
            return
        for user in () if has_batch else users:
            self._align(node, user, node)

    def _is_own(self, node: fx.Node) -> bool:
        """Check that positions in the place of counts give the rows of these.

        Returns: true where the node has a dimension for requests.
        Raises: NotByPosition.
        """
        length = max(first + _NUM_OWN for first in _OWN)
        whole = value_of(node, self._values.sizes(length), self._weights)
        sizes = self._values.sizes(_NUM_OWN, len(_OWN))
        own = value_of(node, sizes, self._weights, self._known)
        if whole is None or own is None:
            return True
        example, of_tokens = node.meta["example_value"], str(self._values.length)
        dims = [d for d, size in enumerate(example.shape) if of_tokens in symbols(size)]
        if len(dims) != 1 or whole.shape[dims[0]] != length:
            if own.shape != whole.shape or not _alike(own, whole):
                raise NotByPosition(f"{node.name} depends on how many tokens a call has")
            return True
        rows = torch.stack([whole.index_select(dims[0], row) for row in self._positions])
        has_batch = whole.shape[0] == 1 and dims[0] > 0
        if not _alike(own, rows.squeeze(1) if has_batch else rows):
            raise NotByPosition(f"{node.name} is not that of the token's position alone")
        return has_batch

    def _align(self, node: fx.Node, user: fx.Node, own: fx.Node) -> None:
        """Let [B, ..] broadcast in a user as [..] of the node did.

        Raises: NotByPosition.
        """
        rank = len(node.meta["example_value"].shape)
        missing = len(user.meta["example_value"].shape) - rank - 1
        if user.target not in _ELEMENTWISE or missing < 0:
            raise NotByPosition(f"{user.name} cannot take positions that requests differ in")
        for _ in range(missing):
            with self._gm.graph.inserting_before(user):
                own = describe(self._gm.graph.call_method("unsqueeze", (own, 1)), node)
        if own is not node:
            user.replace_input_with(node, own)


def _without_leading_ones(count: fx.Node, positions: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes that `_drop_leading_ones` replaces, and what by."""
    for user, shape, is_view in _first_uses(count):
        if user.target in (operator.add, torch.add) and len(shape) == 1:
            yield from _without_leading_ones(user, user)
        if is_view and len(shape) == 2 and shape[0] == "1":
            yield user, positions


def _first_uses(count: fx.Node) -> Iterator[tuple[fx.Node, list[str], bool]]:
    for user in list(count.users):
        shape = [str(size) for size in getattr(user.meta.get("example_value"), "shape", ())]
        yield user, shape, user.target in ("unsqueeze", "view", "reshape", operator.getitem)


def _sizes(node: fx.Node) -> list[str]:
    return [str(size) for size in getattr(node.meta.get("example_value"), "shape", ())]


def _drop_leading_ones(count: fx.Node, positions: fx.Node) -> None:
    """Keep [B, T] where [T] becomes [1, T], directly or behind a sum."""
    for view, value in list(_without_leading_ones(count, positions)):
        view.replace_all_uses_with(value)
        view.graph.erase_node(view)
