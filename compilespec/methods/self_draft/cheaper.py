"""Copies of the target's graph that compute less."""

from __future__ import annotations

import dataclasses

from torch import fx

from compilespec.errors import NotSupported
from compilespec.methods.self_draft.recipe import SelfDraft
from compilespec.program import MIXERS, Traced, markers
from compilespec.tracing.structure import (
    describe,
    head_of,
    layer_of,
    layer_prefix,
    num_decoder_layers,
    residual_streams,
    shape_of,
    token_ids,
)

WINDOW_PLACE = 4  # of a window among the arguments of an attention marker


def keep_layers(target: Traced, recipe: SelfDraft) -> tuple[Traced, dict[str, tuple[int, ...]]]:
    """A copy of the target's graph with the recipe's layers alone; by kind of marker, the number
    that each of them has in the target.

    Raises: InvalidOption (a layer that is not there), NotSupported where it is not known what
    enters and leaves a layer.
    """
    gm = _copy(target.graph_module)
    mixers = {kind: markers(gm, kind) for kind in MIXERS}
    num_layers = num_decoder_layers(gm.graph)
    kept = recipe.kept_layers(num_layers)
    entries = list(zip(gm.graph.find_nodes(op="placeholder"), target.inputs, strict=True))
    if len(kept) < num_layers:
        _leave_out(gm, [layer for layer in range(num_layers) if layer not in kept])
    left = set(gm.graph.nodes)
    inputs = tuple(entry for node, entry in entries if node in left)
    numbers = {
        kind: tuple(index for index, node in enumerate(nodes) if node in left)
        for kind, nodes in mixers.items()
    }
    return dataclasses.replace(target, name="draft", graph_module=gm, inputs=inputs), numbers


def limit_sight(traced: Traced, window: int) -> None:
    """Let each attention see the newest `window` tokens, or fewer where it did before."""
    for node in markers(traced.graph_module):
        own = int(str(node.args[WINDOW_PLACE]))
        node.update_arg(WINDOW_PLACE, min(own or window, window))


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)
    return fx.GraphModule(gm, graph)


def _leave_out(gm: fx.GraphModule, layers: list[int]) -> None:
    """Hand what enters each of these layers on to the readers of what leaves it."""
    streams = _streams(gm)
    prefix = layer_prefix(gm.graph) or ""
    for layer in reversed(layers):
        entering, leaving = streams.get(layer, []), streams.get(layer + 1, [])
        if len(entering) != 1 or len(leaving) != 1:
            raise NotSupported(
                f"SelfDraft(layers=): expected one stream that enters layer {layer} and one that "
                f"leaves it, found {describe(entering)} and {describe(leaving)}: leave layers= out"
            )
        leaving[0].replace_all_uses_with(entering[0])
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and layer_of(node, prefix) in layers:
            gm.graph.erase_node(node)
    gm.recompile()


def _streams(gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
    head = head_of(gm.graph)
    width = (shape_of(head.hidden) or (None,))[-1] if head is not None else None
    return residual_streams(gm.graph, token_ids(gm.graph), width) if width else {}
