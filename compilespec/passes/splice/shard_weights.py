"""One rank's part of a step: weights, heads and caches shared out, collectives between them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from compilespec.errors import PassError
from compilespec.passes.context import PassContext
from compilespec.passes.graph.fakes import NodeError, Shapes, node_values
from compilespec.passes.graph.nodes import add_input, has_role
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.sharding.flow import Flow, Shard
from compilespec.passes.splice.sharding.plan import Sharding
from compilespec.passes.splice.sharding.rules import rule_of
from compilespec.passes.splice.sharding.views import op_name
from compilespec.program import PIECE, InputSpec, module_path

COLLECTIVES = ("all_reduce", "all_gather", "argmax_shard", "dynamic_int8_shard")


def shard_weights(step: Splice) -> int:
    """Cut weights among the ranks, as `ctx.sharding` says or as the graph allows, and sum, gather
    or choose where ranks must know of each other.

    The first graph of a program decides; later ones follow it.  Every node knows which one of the
    whole graph it stands for, and how it is cut: `meta["stands_for"]`.

    Returns: 1, a graph.  Numerics: rounding.  Torch IR, after all splices.
    Raises: PassError where a rank's shapes do not follow from the cuts; InvalidOption where a wish
        of the user's cannot be met.
    """
    sharding = step.ctx.sharding
    assert sharding is not None
    shapes = Shapes()
    values = node_values(step.gm, step.ctx, shapes)
    _note_head(step.gm, sharding, values)
    flow = Flow(step.gm, step.ctx, sharding, values)
    flow.run(rule_of)
    _note_unseen(step, sharding)
    sharding.settled |= set(sharding.cuts)
    placed = {node: flow.of(node, node) for node in step.graph.nodes}
    for node, shard in placed.items():
        node.meta["stands_for"] = (node.name, shard.cut if shard else None)
        name = str(node.meta.get("role"))
        if node.op == "placeholder" and name in flow.caches:
            node.meta["stands_for"] = (node.name, flow.caches[name].cut)
    for node in flow.gathered:
        whole = flow.placed[node]
        assert isinstance(whole, Shard)
        node.meta["stands_for"] = (node.name, whole.cut)
    _bind_pieces(step, sharding, flow)
    _cut_caches(step.ctx, sharding, flow)
    for edit in list(flow.edits.values()):
        edit()
    for node in [node for node in step.graph.nodes if node in flow.gathered]:  # alike on every rank
        _gather(flow, node)
    _check_shapes(step, values, shapes)
    return 1


def _note_head(gm: fx.GraphModule, sharding: Sharding, values: dict[fx.Node, Any]) -> None:
    """How many ids there are: the width of the logits."""
    if not sharding.vocab_size and has_role(gm, "logits"):
        logits = next(node for node in gm.graph.nodes if node.meta.get("role") == "logits")
        sharding.vocab_size = int(values[logits].shape[-1])


def _note_unseen(step: Splice, sharding: Sharding) -> None:
    """Matrices that no rule asked about stay whole, aloud."""
    for node in step.graph.find_nodes(op="placeholder"):
        name = str(node.meta["role"])
        weight = step.ctx.weights.get(name)
        if weight is None or weight.dim() < 2 or name in sharding.cuts:
            continue
        if sharding.may_cut(name):
            readers = ", ".join(sorted({op_name(user) for user in node.users}))
            sharding.cuts[name], sharding.why_whole[name] = None, f"no rule for {readers}"


def _bind_pieces(step: Splice, sharding: Sharding, flow: Flow) -> None:
    """An input of a rank's piece in place of each weight that is cut."""
    for node in step.graph.find_nodes(op="placeholder"):
        name, shard = str(node.meta["role"]), flow.placed.get(node)
        if step.ctx.inputs[name].kind != "weight" or not isinstance(shard, Shard):
            continue
        piece = name + PIECE
        if piece not in step.ctx.weights:
            step.ctx.weights[piece] = shard.cut.piece(
                step.ctx.weights[name], sharding.rank, sharding.size
            )
            sharding.sources[piece], sharding.whole[name] = name, step.ctx.weights[name]
        new = add_input(step.gm, step.ctx, InputSpec(name=piece, kind="weight", sources=(piece,)))
        new.meta["stands_for"] = (node.name, shard.cut)
        users = [user for user in node.users if (node, user) not in flow.whole_uses]
        for user in users:
            user.replace_input_with(node, new)
        node.meta["stands_for"] = (node.name, None)
        if not node.users:
            step.graph.erase_node(node)
            del step.ctx.inputs[name]


def _cut_caches(ctx: PassContext, sharding: Sharding, flow: Flow) -> None:
    """Caches of a rank's heads."""
    for name, shard in flow.caches.items():
        if name not in sharding.caches and shard.cut.parts > 1:
            sharding.caches[name] = shard.cut
            ctx.buffers[name] = sharding.own(ctx.buffers[name])


def _gather(flow: Flow, node: fx.Node) -> None:
    """What the ranks have of a value, side by side, for all that read it."""
    shard = flow.placed[node]
    assert isinstance(shard, Shard)
    if shard.cut.segments or shard.cut.parts != flow.sharding.size:
        raise PassError(
            f"shard_weights ({flow.ctx.key}): {node.name} ({module_path(node)}) is needed whole "
            "and is cut in several stretches; say whole for its weights in tensor_parallel_plan="
        )
    dim, length = shard.cut.dim, int(flow.shape(node)[shard.cut.dim])
    with flow.gm.graph.inserting_after(node):
        whole = flow.gm.graph.call_function(
            torch.ops.compilespec.all_gather.default, (node, dim, length, flow.sharding.size)
        )
    flow.hand_on(node, whole)
    whole.meta["stands_for"] = (whole.meta["stands_for"][0], None)


def _check_shapes(step: Splice, before: dict[fx.Node, Any], shapes: Shapes) -> None:
    """A rank's shapes are those of the whole graph, cut as the flow says.  Raises: PassError."""
    try:
        values = node_values(step.gm, step.ctx, shapes)
    except NodeError as error:
        raise PassError(
            f"shard_weights ({step.ctx.key}): a rank's step fails at {error.node.name} "
            f"({module_path(error.node) or 'top'}): {error.why}"
        ) from error
    whole = {node.name: value for node, value in before.items()}
    for node, value in values.items():
        name, cut = node.meta.get("stands_for", (None, None))
        is_cache = node.op == "placeholder" and str(node.meta["role"]).startswith("cache.")
        if is_cache or name not in whole or not isinstance(value, Tensor):
            continue  # caches have a rank's heads since the first graph
        wanted = [str(size) for size in whole[name].shape]
        if cut is not None:
            wanted[cut.dim] = str(cut.local(tuple(whole[name].shape))[cut.dim])
        if len(wanted) != value.dim() or any(
            one != str(size)
            for one, size in zip(wanted, value.shape, strict=True)
            if one.isdigit() and isinstance(size, int)
        ):
            raise PassError(
                f"shard_weights ({step.ctx.key}): {node.name} ({module_path(node) or 'top'}) is "
                f"{list(value.shape)} on a rank, expected [{', '.join(wanted)}]"
            )


def collectives_of(graph: fx.Graph) -> dict[str, int]:
    """How often a step's ranks speak, by operator; calls that are alike count once, as they run."""
    ops = {getattr(torch.ops.compilespec, name).default: name for name in COLLECTIVES}
    calls = {(ops[node.target], node.args): None for node in graph.nodes if node.target in ops}
    return dict(Counter(name for name, _ in calls))


def whole_buffers(ctx: PassContext) -> dict[str, Any]:
    """The buffers as one process has them."""
    cuts = ctx.sharding.caches if ctx.sharding else {}
    found = dict(ctx.buffers)
    for name, cut in cuts.items():
        if name in found:
            shape = list(found[name].shape)
            shape[cut.dim] *= cut.parts
            found[name] = dataclasses.replace(found[name], shape=tuple(shape))
    return found
