"""Outputs the head's input of all rows of a prefill, for log-probabilities of prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilespec.errors import NotSupported
from compilespec.ops.packed_linear import packed_linear
from compilespec.passes.splice.builder import Splice
from compilespec.program import Traced
from compilespec.tracing.structure import LINEAR, argument, find_head


def output_head_input(step: Splice) -> int:
    """Add the output `head_input_1TD`, the role that `narrow_logits` made before its gather.
    Numerics: exact.  Torch IR.
    """
    step.set_outputs({**step.outputs(), "head_input_1TD": step.roles.head_input})
    return 1


class HeadFunction:
    """The target's own head, run eagerly on rows of its input, [N, D]: logits [N, V].

    Args:
        packed: gives a weight as steps read it in panels, or None.  Then the product is a step's,
            whose bits do not depend on the number of rows.
    Raises: NotSupported if the target's logits are not a product followed by element-wise
    operations.
    """

    def __init__(
        self, target: Traced, packed: Callable[[Tensor], Tensor | None] = lambda weight: None
    ) -> None:
        results: Any = target.graph_module.graph.output_node().args[0]
        logits: fx.Node = results[0]
        head = find_head(logits)
        if head is None or not head.rowwise:
            raise _unsupported()
        weights = {
            node: target.weights[entry.name]
            for node, entry in zip(
                target.graph_module.graph.find_nodes(op="placeholder"), target.inputs, strict=True
            )
            if entry.kind == "weight"
        }
        graph, self._num_rows = fx.Graph(), weights[head.weight].shape[0]
        env: dict[fx.Node, fx.Node] = {head.hidden: graph.placeholder("hidden")}
        chain, node = [head.node], head.node
        while node is not logits:
            node = next(user for user in node.users if user is logits or _leads(user, logits))
            chain.append(node)
        root = nn.Module()
        for node in chain:
            for index, source in enumerate(node.all_input_nodes):
                if source not in env and source in weights:
                    name = f"{node.name}_{index}"
                    root.register_buffer(name, weights[source].detach())
                    env[source] = graph.get_attr(name)
            if any(source not in env for source in node.all_input_nodes):
                raise _unsupported()
            panels = packed(weights[head.weight]) if node is head.node else None
            if panels is None or node.target not in LINEAR:
                env[node] = graph.node_copy(node, lambda old: env[old])
                continue
            root.register_buffer("panels", panels)
            bias = argument(node, 2, "bias")
            parts = (env[head.hidden], graph.get_attr("panels"), bias and env[bias])
            env[node] = graph.call_function(packed_linear, (*parts, self._num_rows))
        graph.output(env[logits])
        self._module = fx.GraphModule(root, graph)

    def of(self, ids: Tensor) -> HeadFunction:
        """The same of some ids alone: logits [N, len(ids)]."""
        narrow = copy.copy(self)
        narrow._module = copy.copy(self._module)
        buffers = dict(self._module.named_buffers())
        narrow._module._buffers = {
            name: buffer[ids] if buffer.shape[:1] == (self._num_rows,) else buffer
            for name, buffer in buffers.items()
        }
        return narrow

    @torch.no_grad()
    def __call__(self, hidden_ND: Tensor) -> Tensor:
        logits: Tensor = self._module(hidden_ND.unsqueeze(0)).squeeze(0)
        return logits


def _leads(node: fx.Node, end: fx.Node) -> bool:
    return any(user is end or _leads(user, end) for user in node.users)


def _unsupported() -> NotSupported:
    return NotSupported(
        "prompt_logprobs=True needs logits that are a product with the head and element-wise "
        "operations on it; this target does more; leave it out"
    )
