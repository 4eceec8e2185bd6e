"""The first node that computes a wrong value after a pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.inspect.compare import compare, rounding_bound
from compilespec.inspect.interpret import Decisions
from compilespec.inspect.stages import PassStages
from compilespec.inspect.verify import bound_of, value_pairs, wanted_values
from compilespec.passes.context import PassContext
from compilespec.passes.references import Case, Values
from compilespec.program import module_path


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The place where a value first parts, and what the pass made on the way to it."""

    name: str
    target: str
    module: str  # path in the model, or the pass that made the node
    what: str  # "role slot", "buffer seq_len_R", "same node as before"
    text: str
    made: tuple[str, ...]  # nodes of this pass that feed it, nearest first

    def __str__(self) -> str:
        made = f"; nodes of this pass that feed it: {', '.join(self.made)}" if self.made else ""
        return f"{self.name} = {self.target} ({self.module}), {self.what}: {self.text}{made}"


def first_parting_node(ctx: PassContext, stages: PassStages, case: Case) -> NodeReport | None:
    """Run the graph that a pass made, and report its earliest node whose value is wrong, or the
    first one that fails; None where all values are the wanted ones.
    """
    bound = rounding_bound(ctx) if stages.record.numerics == "rounding" else None
    decided = Decisions()
    want = wanted_values(ctx, stages, case, decided)
    following = Decisions(bound=bound or 0.0)
    if bound is not None and stages.reference is None:
        following.followed = iter(decided.winners)
    try:
        got = stages.after(case.inputs, decisions=following)
    except (RuntimeError, IndexError, TypeError) as error:
        return _first_failing(stages, str(error))
    order = {node: index for index, node in enumerate(stages.after.graph.nodes)}
    found: list[tuple[int, fx.Node, str, str]] = []
    for what, node, one, other in _compared(ctx, stages, case, got, want):
        if one is None:
            found.append((order[node], node, what, "missing on one side"))
        elif difference := compare(one, other, bound=bound_of(ctx, what, want, bound)):
            found.append((order[node], node, what, difference.text))
    parted = {node.name: node for node in order if node.name in following.parted}
    found += [(order[node], node, "argmax", "another winner") for node in parted.values()]
    if not found:
        return None
    # several nodes may write a buffer: it says less than a value that one node made
    precise = [entry for entry in found if not entry[2].startswith("buffer")]
    _, node, what, text = min(precise or found, key=lambda entry: entry[0])
    return _report(stages, node, what, text)


def _compared(
    ctx: PassContext, stages: PassStages, case: Case, got: Values, want: Values
) -> Iterator[tuple[str, fx.Node, Tensor | None, Tensor]]:
    """(what, node, got, wanted) of every value that belongs to one node of the graph after."""
    graph = stages.after.graph
    nodes = {node.name: node for node in graph.nodes}
    if stages.reference is None:
        for name, node in nodes.items():
            pair = got.nodes.get(name), want.nodes.get(name)
            if isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor):
                yield "same node as before", node, pair[0], pair[1]
    output = next(iter(reversed(graph.nodes)))
    made = dict(zip(output.meta["names"], output.args[0], strict=True))
    roles = {
        node.meta["role"]: node
        for node in graph.nodes
        if "role" in node.meta and node.op != "placeholder"
    }
    with_roles = stages.record.level == "torch"
    for what, one, other in value_pairs(ctx, case, got, want, with_roles=with_roles):
        kind, name = what.split(" ", 1)
        if kind == "call":
            first, _, last = name.partition(" ")
            node = nodes.get(first) or _first_writer(graph, last.removeprefix("over ")) or output
        else:
            known = {"output": made, "role": roles}.get(kind, {})
            node = known.get(name) or _first_writer(graph, name) or output
        yield what, node, one, other


def _first_writer(graph: fx.Graph, buffer: str) -> fx.Node | None:
    """The first node that writes a buffer: later ones build on it."""
    for node in graph.nodes:
        if node.op == "call_method" and str(node.target).endswith("_"):
            written = node.args[:1]
        elif node.op == "call_function":
            written = tuple(node.args[i] for i in _torch_compat.mutated_arguments(node.target))
        else:
            continue
        if any(isinstance(arg, fx.Node) and arg.meta.get("role") == buffer for arg in written):
            return node
    return None


def _first_failing(stages: PassStages, text: str) -> NodeReport | None:
    """The node that fx names in the message of an error while it ran."""
    for line in text.splitlines():
        if line.startswith("While executing %"):
            name = line.removeprefix("While executing %").split(" ", 1)[0]
            for node in stages.after.graph.nodes:
                if node.name == name:
                    return _report(stages, node, "does not run", text.splitlines()[0])
    return None


def _report(stages: PassStages, node: fx.Node, what: str, text: str) -> NodeReport:
    custom = node.meta.get("custom") or {}
    return NodeReport(
        name=node.name,
        target=str(node.target),
        module=module_path(node) or f"made by {custom.get('pass', 'tracing')}",
        what=what,
        text=text,
        made=tuple(made.name for made in _made_before(stages, node))[:5],
    )


def _made_before(stages: PassStages, node: fx.Node) -> Iterator[fx.Node]:
    """Ancestors of the node that the graph before lacks, or has in another form."""
    old = {other.name: (other.target, str(other.args)) for other in stages.before.graph.nodes}
    frontier, seen = [node], {node}
    while frontier:
        current = frontier.pop(0)
        is_new = old.get(current.name) != (current.target, str(current.args))
        if is_new and current.op != "placeholder":
            if current is not node:
                yield current
            new = [source for source in current.all_input_nodes if source not in seen]
            seen.update(new)
            frontier += new
