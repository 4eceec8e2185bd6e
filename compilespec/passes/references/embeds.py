"""References of the passes that read what the host gives with images: a row at a time."""

from __future__ import annotations

from typing import Any

from torch import fx

from compilespec.passes.context import PassContext
from compilespec.passes.references.base import Before, Case, Values
from compilespec.program import marker_kind, module_path


def read_embeds(before: Before, ctx: PassContext, case: Case) -> Values:
    """The graph before, with rows of the first embedding module's output replaced."""
    embedding = next(n for n in before.graph.nodes if "embedding" in str(n.target))
    of_module = [
        node
        for node in before.graph.nodes
        if node.op.startswith("call") and module_path(node) == module_path(embedding)
    ]

    def replace(node: fx.Node, arguments: tuple[Any, ...], result: Any) -> Any:
        if node is not of_module[-1]:
            return result
        replaced = result.clone()
        for token, row in enumerate(case.inputs["given_T"].tolist()):
            if row >= 0:
                replaced[0, token] = case.inputs["embeds_PD"][row]
        return replaced

    return before(case.inputs, follow=replace)


def add_deep_rows(before: Before, ctx: PassContext, case: Case) -> Values:
    """The graph before, with the features of given rows added to what each marker copies."""
    given = case.inputs["given_T"].tolist() if "given_T" in case.inputs else []

    def add(node: fx.Node, arguments: tuple[Any, ...], result: Any) -> Any:
        if marker_kind(node) != "deep_rows":
            return result
        added, (_, index), width = result.clone(), arguments, result.shape[-1]
        for token, row in enumerate(given):
            if row >= 0:
                features = case.inputs["deep_PE"][row].split(width)
                added[0, token] += features[index]
        return added

    return before(case.inputs, follow=add)
