"""Turns attention that a model writes out, softmax(query @ key.T) @ value, into the marker.

What lies between the first product and the softmax must be a factor and a mask: it is computed with
numbers in the place of the scores, to see the factor, and with zeros in the graph, which leaves the
mask.  `read_masks` then reads the mask like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from compilespec._torch_compat import size_expression
from compilespec.program import Traced, module_path
from compilespec.tracing.naming import source_line
from compilespec.tracing.pair_masks import (
    CannotSplit,
    Pairs,
    Trial,
    end_writes,
    made_of_pairs,
    pairs_behind,
)
from compilespec.tracing.positions import describe, is_write, num_token_dims
from compilespec.tracing.structure import token_ids

_SOFTMAX = (torch.softmax, torch.nn.functional.softmax, "softmax")
_PRODUCTS = (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm")
_SAME = ("to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "view", "reshape",
         torch.nn.functional.dropout)  # fmt: skip

_TRIALS = (13, 29)  # tokens of each
_OTHER_SCORES = (3, -3, 2000, -2000)  # a trial's scores are multiplied with each


class _NoMatch(Exception):
    """Why a softmax is not that of attention."""


def mark_eager_attention(traced: Traced) -> list[str]:
    """Replace attention over all tokens by the marker, with its mask, in place.

    Returns: why each other softmax is not that of attention; those are left alone.
    """
    gm, reasons = traced.graph_module, list[str]()
    found = [node for node in gm.graph.nodes if node.target in _SOFTMAX]
    if not found:
        return []
    ids = token_ids(gm.graph)
    batch, length = ids.meta["example_value"].shape
    for softmax in found:
        if num_token_dims(softmax, str(length)) != 2:
            continue
        where = f"{module_path(softmax) or 'the model'}; {source_line(softmax)}"
        try:
            _WrittenAttention(traced, softmax, {"batch": batch, "length": length}).mark()
        except (_NoMatch, CannotSplit) as error:
            reasons.append(f"{where}: {error}")
    if len(reasons) < len(found):
        gm.graph.eliminate_dead_code(_may_go)
        gm.recompile()
    return reasons


def _may_go(node: fx.Node) -> bool:
    """Keep placeholders, which a call is bound to by place, and what writes in place."""
    return node.op in ("placeholder", "output") or is_write(node)


class _WrittenAttention:
    """The nodes of one layer's attention."""

    def __init__(self, traced: Traced, softmax: fx.Node, sizes: Mapping[str, Any]) -> None:
        self._traced, self._gm = traced, traced.graph_module
        self._softmax, self._sizes, self._length = softmax, sizes, str(sizes["length"])

    def mark(self) -> None:
        _check_dim(self._softmax)
        made = made_of_pairs(self._gm, self._length)
        end_writes(self._gm, made)
        mixed, value = self._second_product()
        scores, query, key = self._first_product(made)
        mask = _node(self._softmax.args[0])
        if mask is scores:
            raise _NoMatch("it has no mask")
        between = pairs_behind(self._gm, mask, made - {scores}, self._length)
        scale = self._factor(scores, between)
        with self._gm.graph.inserting_before(self._softmax):
            self._put_marker(mixed, scores, between, (query, key, value), scale)

    def _second_product(self) -> tuple[fx.Node, fx.Node]:
        """The product with the values, and these."""
        node = self._softmax
        while True:
            users = list(node.users)
            if len(users) != 1:
                raise _NoMatch("the weights are read by several")
            (user,) = users
            if user.target in _PRODUCTS and user.args[0] is node:
                return user, _node(user.args[1])
            if user.target not in _SAME or user.args[0] is not node:
                raise _NoMatch(f"{user.name} reads the weights")
            node = user

    def _first_product(self, made: set[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The product of queries and keys; queries, and keys with their last dimensions swapped."""
        found, seen, todo = list[fx.Node](), set[fx.Node](), [self._softmax]
        while todo:
            node = todo.pop()
            if node in seen or node not in made:
                continue
            seen.add(node)
            if node.target in (*_PRODUCTS, "baddbmm", torch.baddbmm):
                found.append(node)
            else:
                todo += node.all_input_nodes
        if len(found) != 1:
            raise _NoMatch(f"{len(found)} products make the scores")
        (product,) = found
        if product.target in ("baddbmm", torch.baddbmm):
            product = self._without_sum(product, made)
        query, key = _node(product.args[0]), _node(product.args[1])
        if num_token_dims(query, self._length) != 1 or num_token_dims(key, self._length) != 1:
            raise _NoMatch("the product is not of queries and keys")
        return product, query, key

    def _without_sum(self, node: fx.Node, made: set[fx.Node]) -> fx.Node:
        """baddbmm(bias, query, key) as bias * beta + bmm(query, key) * alpha."""
        names = ("input", "batch1", "batch2")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        graph = self._gm.graph
        with graph.inserting_before(node):
            product = graph.call_function(torch.bmm, (given["batch1"], given["batch2"]))
            scaled = graph.call_function(torch.mul, (product, given.get("alpha", 1)))
            bias = graph.call_function(torch.mul, (given["input"], given.get("beta", 1)))
            total = graph.call_function(torch.add, (scaled, bias))
        for new in (product, scaled, total):
            describe(new, node)
        describe(bias, _node(given["input"]))
        node.replace_all_uses_with(total)
        made.update((product, scaled, total))
        if num_token_dims(bias, self._length) > 1 or _node(given["input"]) in made:
            made.add(bias)
        graph.erase_node(node)
        return product

    def _factor(self, scores: fx.Node, between: Pairs) -> float:
        """The number that scores are multiplied with, where they are not masked."""
        found: list[Tensor] = []
        for seed, num_tokens in enumerate(_TRIALS):
            trial = Trial(self._traced.weights, between, self._sizes, seed, num_tokens)
            shape = trial.shape_of(scores)
            one = torch.rand(shape, dtype=torch.float64).to(scores.meta["example_value"].dtype) + 1
            nothing, once = (trial.whole({scores: one * factor}).double() for factor in (0, 1))
            seen = (nothing > -1e4).expand(once.shape)
            other = one.double().reshape(once.shape)
            factors = ((once - nothing) / other)[seen]
            for times in _OTHER_SCORES:
                more = trial.whole({scores: one * times}).double()
                again = ((more - nothing) / (times * other))[seen]
                if not factors.numel() or not torch.allclose(factors, again, rtol=1e-4):
                    raise _NoMatch("scores are more than scaled")
            found.append(factors)
        every = torch.cat(found)
        if not torch.allclose(every, every[:1].expand_as(every), rtol=1e-4):
            raise _NoMatch("scores have several factors")
        return float(f"{float(every.median()):.7g}")

    def _put_marker(
        self,
        mixed: fx.Node,
        scores: fx.Node,
        between: Pairs,
        parts: tuple[fx.Node, fx.Node, fx.Node],
        scale: float,
    ) -> None:
        graph, (query, key, value) = self._gm.graph, parts
        self._check_readers(scores, between)
        self._check_heads(query, key, value)
        with graph.inserting_before(scores):
            nothing = self._zeros(scores)
        scores.replace_all_uses_with(nothing)
        mask = self._by_head(between.mask)
        new_query, new_value = self._by_head(query), self._by_head(value)
        swapped = describe(graph.call_method("transpose", (key, -1, -2)), key)
        swapped.meta["example_value"] = key.meta["example_value"].transpose(-1, -2)
        new_key = self._by_head(swapped)
        dtype = value.meta["example_value"].dtype
        new_query, new_key = (self._cast(node, dtype) for node in (new_query, new_key))
        marker = graph.call_function(
            torch.ops.compilespec.attention,
            (new_query, new_key, new_value, scale, 0, 0.0, None, 0, mask),
        )
        output = graph.call_method("transpose", (marker, 1, 2))
        describe(marker, mixed)
        describe(output, mixed)
        output.meta["example_value"] = _four(mixed.meta["example_value"], self._sizes["batch"])
        marker.meta["example_value"] = output.meta["example_value"].transpose(1, 2)
        if len(mixed.meta["example_value"].shape) == 3:
            output = describe(graph.call_method("flatten", (output, 0, 1)), mixed)
        mixed.replace_all_uses_with(output)

    def _check_readers(self, scores: fx.Node, between: Pairs) -> None:
        """Raises: _NoMatch where something else reads what is made of the scores."""
        made = {scores}
        for node in between.nodes:
            if made.intersection(node.all_input_nodes):
                made.add(node)
        known = {*between.nodes, self._softmax}
        others = [user for node in made for user in node.users if user not in known]
        if others:
            raise _NoMatch(f"the scores are read by {others[0].name}, too")

    def _check_heads(self, *parts: fx.Node) -> None:
        """Raises: _NoMatch."""
        dims = {len(part.meta["example_value"].shape) for part in parts}
        if not dims <= {3, 4}:
            raise _NoMatch("its queries, keys and values are not [B, heads, T, width]")
        query, key, value = (
            _four(part.meta["example_value"], self._sizes["batch"]).shape[1] for part in parts
        )
        if key != value or query % key:
            raise _NoMatch(f"{query} heads of queries, {key} of keys and {value} of values")

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["example_value"].dtype == dtype:
            return node
        cast = describe(self._gm.graph.call_method("to", (node, dtype)), node)
        cast.meta["example_value"] = node.meta["example_value"].to(dtype)
        return cast

    def _zeros(self, scores: fx.Node) -> fx.Node:
        """Zeros in the shape of the scores."""
        example, graph = scores.meta["example_value"], self._gm.graph
        sizes = []
        for size in example.shape:
            if isinstance(size, int):
                sizes.append(size)
                continue
            known = {str(n.meta["example_value"]): n for n in graph.nodes if _is_symbol(n)}
            node: Any = known.get(str(size))
            if node is None:  # heads and requests in one dimension
                symbol = known[str(self._sizes["batch"])]
                factor = _times(size, self._sizes["batch"])
                node = describe(graph.call_function(operator.mul, (symbol, factor)), scores)
                node.meta["example_value"] = size
            sizes.append(node)
        options = {"dtype": example.dtype, "device": example.device}
        return describe(graph.call_function(torch.zeros, (tuple(sizes),), options), scores)

    def _by_head(self, node: fx.Node) -> fx.Node:
        """[B, N, T, ..] of a tensor that may have requests and heads in one dimension."""
        if len(node.meta["example_value"].shape) == 4:
            return node
        example = _four(node.meta["example_value"], self._sizes["batch"])
        heads = example.shape[1]
        view = describe(self._gm.graph.call_method("unflatten", (node, 0, (-1, heads))), node)
        view.meta["example_value"] = example
        return view


def _four(example: Tensor, batch: Any) -> Tensor:
    """A fake tensor [B, N, ..] of one [B * N, ..]."""
    if len(example.shape) == 4:
        return example
    heads = _times(example.shape[0], batch)
    return example.new_empty((batch, heads, *example.shape[1:]))


def _times(size: Any, batch: Any) -> int:
    """How often a size is the number of requests."""
    if isinstance(size, torch.SymInt):
        factor = size_expression(size) / size_expression(batch)
        if factor.is_number and factor.is_integer:
            return int(factor)
    raise _NoMatch("heads and requests cannot be told apart")


def _check_dim(softmax: fx.Node) -> None:
    rest = softmax.args[1:]
    dim: Any = softmax.kwargs.get("dim", rest[0] if rest else None)
    if dim not in (-1, len(softmax.meta["example_value"].shape) - 1):
        raise _NoMatch("it is not over keys")


def _is_symbol(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta.get("role") == "symbol"


def _node(value: Any) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise _NoMatch("it is not made of tensors")
    return value
