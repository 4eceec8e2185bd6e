"""Runs a captured graph on its own, operator by operator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.passes.references.base import Follow, Mixers
from compilespec.program import Traced, marker_kind


def run_fragment(
    fragment: Traced,
    arguments: dict[str, Tensor],
    mixers: Mixers | None = None,
    kept_ids: Tensor | None = None,
    follow: Follow | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of `fragment`; `mixers` are called in place of its markers, and `follow` gives
    what is read in place of the result of every other node.

    With `kept_ids` its last product computes these columns alone, and an argmax gives such an id.
    """
    graph = fragment.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    sizes: dict[str, int] = {}
    for node, entry in zip(placeholders, fragment.inputs, strict=True):
        if entry.kind == "argument":
            example = node.meta["example_value"].shape
            for symbol, size in zip(example, arguments[entry.name].shape, strict=True):
                sizes[str(symbol)] = size
    feeds: list[Any] = []
    for node, entry in zip(placeholders, fragment.inputs, strict=True):
        if entry.kind == "argument":
            feeds.append(arguments[entry.name])
        elif entry.kind == "weight":
            feeds.append(fragment.weights[entry.name])
        else:
            feeds.append(sizes[str(node.meta["example_value"])])
    runner = _Fragment(fragment.graph_module, mixers or {}, kept_ids, follow)
    results: tuple[Tensor, ...] = runner.run(*feeds)
    return results


def products(gm: fx.GraphModule) -> list[fx.Node]:
    """The products of a captured graph, in execution order."""
    return [node for node in gm.graph.nodes if "linear" in str(node.target)]


class _Fragment(fx.Interpreter):
    def __init__(
        self,
        gm: fx.GraphModule,
        mixers: Mixers,
        kept_ids: Tensor | None,
        follow: Follow | None,
    ) -> None:
        super().__init__(gm)
        self._follow = follow
        self._mixers, self._num_markers = mixers, Counter[str]()
        self._kept_ids, self._head = kept_ids, products(gm)[-1:]

    def run_node(self, n: fx.Node) -> Any:
        if self._kept_ids is not None and n in self._head:
            (x, *weights), options = self.fetch_args_kwargs_from_env(n)
            whole = [*weights, *options.values()]  # and a bias, where there is one
            kept: Any = (part if part is None else part[self._kept_ids] for part in whole)
            return torch.nn.functional.linear(x, *kept)
        if self._kept_ids is not None and "argmax" in str(n.target):
            return self._kept_ids[super().run_node(n)]
        kind = marker_kind(n)
        if kind not in self._mixers:
            result = super().run_node(n)
            if self._follow is None or n.op != "call_function":
                return result
            return self._follow(n, self.fetch_args_kwargs_from_env(n)[0], result)
        args, _ = self.fetch_args_kwargs_from_env(n)
        self._num_markers[kind] += 1
        return self._mixers[kind](self._num_markers[kind] - 1, args)
