"""Runs a captured graph on its own, operator by operator."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, fx

from compilespec.passes.references.base import Mixers
from compilespec.program import Traced, marker_kind


def run_fragment(
    fragment: Traced, arguments: dict[str, Tensor], mixers: Mixers | None = None
) -> tuple[Tensor, ...]:
    """The outputs of `fragment`; `mixers` are called in place of its markers."""
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
    results: tuple[Tensor, ...] = _Fragment(fragment.graph_module, mixers or {}).run(*feeds)
    return results


class _Fragment(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mixers: Mixers) -> None:
        super().__init__(gm)
        self._mixers, self._num_markers = mixers, Counter[str]()

    def run_node(self, n: fx.Node) -> Any:
        kind = marker_kind(n)
        if kind not in self._mixers:
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        self._num_markers[kind] += 1
        return self._mixers[kind](self._num_markers[kind] - 1, args)
