"""Every stage of a phase's graph by name, with shapes in the legend's letters.

A stage is named by the pass it comes after; the first is "start", and a captured graph, which no
pass has seen, is a separate stage: "target", "draft.forward", ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.errors import InvalidOption
from compilespec.errors.suggest import did_you_mean
from compilespec.inspect.stages import context_of
from compilespec.passes.context import PassContext
from compilespec.passes.graph.fakes import EXAMPLE_SIZES, fake_weight
from compilespec.passes.order import ATEN_PASSES, SPLICE_PASSES
from compilespec.program import PassRecord, Phase, PhaseGraph, SpecProgram, Traced

START = "start"
TO_ATEN = "to_aten"
CAPTURED = ("target", "draft")  # what `--phase` takes beside the phases of a step
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class GraphStage:
    """One graph as it was at one point of the pipeline."""

    name: str  # the pass that left it so, START, or the name of a captured graph
    graph: fx.Graph
    owner: torch.nn.Module  # holds the graph's constants
    values: Mapping[fx.Node, Any]  # fake results, where they are known
    symbols: Mapping[str, str]  # names of the shape environment's symbols: {"s75": "B"}
    record: PassRecord | None = None  # of the pass; None where no pass made the stage

    def size(self, size: Any) -> int | str:
        """A dimension: a number, or an expression in the legend's letters."""
        if isinstance(size, int):
            return size
        return re.sub(r"\bs\d+\b", lambda match: self.symbols.get(match[0], match[0]), str(size))


class PhaseStages:
    """The stages of one phase, in order.  The retrace to ATen runs only when a stage needs it.

    Needs the passes' graphs: `trace(..., keep_graphs=True)`.
    """

    def __init__(self, phase: PhaseGraph, *, with_shapes: bool = True) -> None:
        self.phase = phase
        self._shapes = SplicedShapes(context_of(phase)) if with_shapes else None

    @property
    def names(self) -> list[str]:
        """The names of all stages."""
        return [START, *(record.name for record in self.phase.records)]

    def position(self, name: str) -> int:
        """The index of a stage.  Raises: InvalidOption that names the passes, the nearest first."""
        splices = [START, *(record.name for record in self.phase.splice_records)]
        if name in splices:
            return splices.index(name)
        if name in self.names:
            return self.names.index(name)
        raise unknown_pass(name, self.names[1:], self.phase.phase)

    def __getitem__(self, position: int) -> GraphStage:
        num_splices = len(self.phase.splice_records)
        if position < 0:
            position += len(self.names)
        if position == 0:
            first = self.phase.splice_records[0]
            return self._stage(START, first.before, None, self.phase.spliced)
        if position <= num_splices:
            record = self.phase.splice_records[position - 1]
            return self._stage(record.name, record.after, record, self.phase.spliced)
        record = self.phase.records[position - 1]
        return self._stage(record.name, record.after, record, self.phase.graph_module)

    def __iter__(self) -> Iterator[GraphStage]:
        for position in range(len(self.names)):
            yield self[position]

    def _stage(
        self, name: str, graph: fx.Graph | None, record: PassRecord | None, owner: fx.GraphModule
    ) -> GraphStage:
        if graph is None:
            raise InvalidOption("the program keeps no graphs; trace with keep_graphs=True")
        if record is not None and record.level == "aten":
            values = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
            symbols = _aten_symbols(graph)
        elif self._shapes is not None:
            values, symbols = self._shapes.of(graph, owner), self._shapes.symbols
        else:
            values, symbols = {}, {}
        return GraphStage(
            name=name, graph=graph, owner=owner, values=values, symbols=symbols, record=record
        )


def captured_stages(program: SpecProgram, which: str) -> list[GraphStage]:
    """The captured graphs of the target, or of the drafter's calls, before any pass.

    Raises: InvalidOption for the drafter of a program that has none.
    """
    ctx = context_of(next(iter(program.graphs.values())))
    traced = [ctx.target] if which == "target" else list(ctx.draft.values())
    if not traced:
        raise InvalidOption(f"spec={program.method!r} has no drafter: there is no draft graph")
    return [_captured(one) for one in traced]


def unknown_pass(name: str, ran: list[str], phase: Phase) -> InvalidOption:
    """The error for a pass that a phase did not run."""
    known = [*(entry.name for entry in SPLICE_PASSES), TO_ATEN]
    known += [entry.name for entry in ATEN_PASSES]
    if name in known:
        what = f"pass {name} did not run in phase {phase};"
    else:
        what = f"unknown pass {name!r}{did_you_mean(name, known) or ';'}"
    return InvalidOption(f"{what} passes of {phase}: {', '.join(ran)}")


def _captured(traced: Traced) -> GraphStage:
    graph = traced.graph_module.graph
    values = {n: n.meta["example_value"] for n in graph.nodes if "example_value" in n.meta}
    symbols: dict[str, str] = {}
    for node, entry in zip(graph.find_nodes(op="placeholder"), traced.inputs, strict=True):
        value = values.get(node)
        if entry.kind == "argument" and isinstance(value, Tensor):
            for size, letter in zip(value.shape, "BT", strict=False):
                if not isinstance(size, int):
                    symbols.setdefault(str(size), letter)
    return GraphStage(
        name=traced.name, graph=graph, owner=traced.graph_module, values=values, symbols=symbols
    )


def _aten_symbols(graph: fx.Graph) -> dict[str, str]:
    """Batch inputs, `row_B` and such, carry the symbols and end in their letters."""
    return {
        str(node.meta["val"].shape[0]): node.name[-1]
        for node in graph.find_nodes(op="placeholder")
        if node.name[-2:-1] == "_"
        and node.name[-1] in EXAMPLE_SIZES
        and not isinstance(node.meta["val"].shape[0], int)
    }


class SplicedShapes:
    """Finds shapes of spliced graphs, which carry none, by running them on fake tensors.

    One memory serves all stages: a node that a pass left as it was, over operands that it left as
    they were, is not run again.
    """

    def __init__(self, ctx: PassContext) -> None:
        self._ctx = ctx
        self._mode = _torch_compat.fake_mode()
        letters = "B" if ctx.phase == "decode" else "TR"  # B and R would share a symbol
        self._sizes = {letter: self._symbol(EXAMPLE_SIZES[letter]) for letter in letters}
        self.symbols = {str(size): letter for letter, size in self._sizes.items()}
        self._known: dict[Any, Any] = {}

    def of(self, graph: fx.Graph, owner: torch.nn.Module) -> dict[fx.Node, Any]:
        """The fake result of every node."""
        run = _FakeRun(fx.GraphModule(owner, graph), self._known)
        inputs = [self._input(node) for node in graph.find_nodes(op="placeholder")]
        with _torch_compat.running_fakes(self._mode):
            run.run(*inputs, enable_io_processing=False)
        return run.values

    def _symbol(self, size: int) -> Any:
        example = torch.empty(size, dtype=torch.int32)
        return _torch_compat.fake_tensor(self._mode, example, dynamic_dims=(0,)).shape[0]

    def _input(self, node: fx.Node) -> Any:
        role, ctx = str(node.meta["role"]), self._ctx
        if role not in self._known:
            self._known[role] = self._fake(role, ctx)
        return self._known[role]

    def _fake(self, role: str, ctx: PassContext) -> Any:
        spec = ctx.declared.get(role) or ctx.inputs.get(role)
        if spec is not None and spec.kind == "weight":
            return fake_weight(self._mode, spec, ctx)
        device = ctx.config.device
        with self._mode:
            if spec is None:  # the target's own arguments, which `read_state` takes away
                return torch.empty(self._token_shape(), dtype=torch.int32, device=device)
            if spec.kind == "batch":
                return torch.empty(self._sizes[role[-1]], dtype=torch.int32, device=device)
            return ctx.buffers[role].empty(device)

    def _token_shape(self) -> tuple[Any, Any]:
        """[B, S] in decode; prefill packs its tokens into one row."""
        if self._ctx.phase == "prefill":
            return 1, self._sizes["T"]
        return self._sizes["B"], self._ctx.config.num_verify_tokens


class _FakeRun(fx.Interpreter):
    """Keeps every node's result, and takes the results in `known`."""

    def __init__(self, gm: fx.GraphModule, known: dict[Any, Any]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.known = known
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            result = super().run_node(n)
        else:
            operands = fx.node.map_arg((n.args, n.kwargs), lambda node: f"%{id(self.env[node])}")
            key = (n.name, n.op, str(n.target), str(operands))
            result = self.known.get(key, _MISSING)
            if result is _MISSING:
                result = self.known[key] = super().run_node(n)
        self.values[n] = result
        return result
