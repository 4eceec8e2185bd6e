"""Golden tables of step graphs: a change of a graph is a diff that a reviewer reads.

A row is op, target with its arguments, dtype[shape] and module.  An operand is the name of an
input, that of a node which layers share, or ^n, the node n rows above (folded rows counted).
Symbols are numbered by first use, and layers that equal the one before are folded.  `make
accept-snapshots` (or `pytest tests/passes/test_snapshots.py --accept-snapshots`) writes them anew.
"""

from __future__ import annotations

import difflib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx

import compilespec
from compilespec.methods.eagle3 import random_head
from compilespec.program import PHASES, SpecProgram
from tests.support.models import target_info, tiny_target

DIRECTORY = Path(__file__).parents[1] / "snapshots"
MADE_WITH = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
STAGES = ("spliced", "aten", "final")


# --- the table ---


class Table:
    """Rows of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._symbols: dict[str, str] = {}
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._shared = {node for node in graph.nodes if self._is_shared(node)}
        self.nodes = [(self._block(node), self._row(node)) for node in graph.nodes]

    def lines(self) -> list[str]:
        """Rows, consecutive equal blocks folded."""
        blocks = [
            [row for _, row in rows]
            for _, rows in itertools.groupby(self.nodes, key=lambda pair: pair[0])
        ]
        lines: list[str] = []
        for rows, equal in itertools.groupby(blocks):
            count = len(list(equal))
            lines += rows
            if count > 1:
                lines.append(f"    (these {len(rows)} rows {count} times)")
        return lines

    def _block(self, node: fx.Node) -> tuple[Any, ...]:
        """Which layer of which copy of a fragment the node is of."""
        custom = node.meta.get("custom") or {}
        path = str(node.meta.get("role") if node.op == "placeholder" else custom.get("module"))
        layer = re.search(r"\.(\d+)\.", f"{path}.")
        return custom.get("fragment"), custom.get("copy"), layer[1] if layer else None

    def _is_shared(self, node: fx.Node) -> bool:
        """True where a layer reads a node that is in none, or in one before the last."""
        own = self._block(node)[2]
        layers = [layer for user in node.users if (layer := self._block(user)[2]) is not None]
        is_far = own is None or any(int(layer) > int(own) + 1 for layer in layers)
        return node.op != "placeholder" and bool(layers) and is_far

    def _row(self, node: fx.Node) -> str:
        custom = node.meta.get("custom") or {}
        if node.op in ("placeholder", "output"):
            what, where = str(node.meta.get("role") or self._outputs(node)), ""
        else:
            arguments = [self._argument(node, arg) for arg in node.args]
            arguments += [
                f"{key}={self._argument(node, value)}"
                for key, value in node.kwargs.items()
                if key not in ("device", "layout", "pin_memory")
            ]
            name = f"{node.name} = " if node in self._shared else ""
            what = f"{name}{_target(node)}({', '.join(arguments)})"
            module = f"{custom.get('fragment', '')} {custom.get('module', '')}".strip()
            where = module or str(custom.get("pass", ""))
        op = {"call_function": "call", "call_method": "method"}.get(node.op, node.op)
        row = f"{op:12}{what}  {self._value(node)}  {where}".rstrip()
        return re.sub(r"(?<=[a-z_*])\.\d+(?=[.\s,)\]=]|$)", ".*", row)

    def _outputs(self, node: fx.Node) -> str:
        parts = node.args[0] if isinstance(node.args[0], tuple) else node.args
        named = zip(node.meta.get("names", ()), parts, strict=True)
        return ", ".join(f"{name}={self._argument(node, part)}" for name, part in named)

    def _argument(self, user: fx.Node, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.op == "placeholder":
                return str(value.meta.get("role"))
            if value in self._shared and self._block(user) != self._block(value):
                return value.name
            return f"^{self._places[user] - self._places[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(user, part) for part in value)}]"
        return "end" if value == 2**63 - 1 else str(value).removeprefix("torch.")

    def _value(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            shape, dtype = [self._size(size) for size in value.shape], value.dtype
        elif "example" in node.meta:
            sizes, dtype = node.meta["example"]
            shape = ["?" if size is None else str(size) for size in sizes]
        else:
            return self._size(value) if isinstance(value, torch.SymInt) else ""
        return f"{str(dtype).removeprefix('torch.')}[{', '.join(shape)}]"

    def _size(self, size: Any) -> str:
        def number(match: re.Match[str]) -> str:
            return self._symbols.setdefault(match[0], f"s{len(self._symbols)}")

        return re.sub(r"\bs\d+\b", number, str(size))


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', None) or 'builtin'}.{target.__name__}"


def test_the_table_is_normalised():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["role"] = "row_B"
    for layer in (0, 1, 2):
        node = graph.call_function(torch.ops.aten.add.Tensor, (x, layer // 2))
        node.meta["custom"] = {"fragment": "target", "module": f"layers.{layer}.mlp"}
        node.meta["example"] = ((None, 8), torch.float32)
    graph.output(node).meta["names"] = ("logits",)
    assert Table(graph).lines() == [
        "placeholder row_B",
        "call        aten.add.Tensor(row_B, 0)  float32[?, 8]  target layers.*.mlp",
        "    (these 1 rows 2 times)",
        "call        aten.add.Tensor(row_B, 1)  float32[?, 8]  target layers.*.mlp",
        "output      logits=^1",
    ]


def test_swapped_operands_are_another_row():
    def lines(swap: bool) -> list[str]:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["role"] = "x_B"
        square = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
        pair = (square, x) if swap else (x, square)
        node = graph.call_function(torch.ops.aten.sub.Tensor, pair)
        graph.output(node).meta["names"] = ("difference",)
        return Table(graph).lines()

    assert lines(swap=False)[2] == "call        aten.sub.Tensor(x_B, ^1)"
    assert lines(swap=True)[2] == "call        aten.sub.Tensor(^1, x_B)"


# --- the snapshots ---


@pytest.fixture(scope="module")
def llama() -> SpecProgram:
    """Two layers and a drafter: small enough to read every stage."""
    model = tiny_target("llama", torch.float32, num_layers=2)
    head = random_head(target_info(model, 64), aux_layers=(0, 1, 2), num_draft_tokens=2).eval()
    return compilespec.trace(model, spec="eagle3", draft=head, max_seq_len=64, num_draft_tokens=2)


@pytest.fixture(scope="module")
def demo() -> SpecProgram:
    return compilespec.trace("demo", spec="eagle3", device="cpu", keep_graphs=False)


def check(name: str, graph: fx.Graph, request: pytest.FixtureRequest) -> None:
    path = DIRECTORY / f"{name}.txt"
    lines = Table(graph).lines()
    if request.config.getoption("--accept-snapshots"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([f"# {MADE_WITH}", *lines, ""]))
        return
    assert path.exists(), f"no snapshot {path.name}; `make accept-snapshots` makes it"
    head, *want = path.read_text().splitlines()
    if head != f"# {MADE_WITH}":
        pytest.skip(f"the snapshot is of {head[2:]}; this is {MADE_WITH}")
    diff = list(difflib.unified_diff(want, lines, "snapshot", "now", lineterm="", n=2))
    assert not diff, "\n".join(
        [f"{path.name} changed; if that is meant, `make accept-snapshots`:", *diff[:200]]
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("phase", PHASES)
def test_llama_by_stage(llama, phase, stage, request):
    graph = llama.graphs[phase]
    records = {record.name: record for record in graph.records}
    stages = {
        "spliced": graph.spliced.graph,
        "aten": records["to_aten"].after,
        "final": graph.graph_module.graph,
    }
    check(f"llama.{phase}-{stage}", stages[stage], request)


@pytest.mark.parametrize("phase", PHASES)
def test_demo_final(demo, phase, request):
    check(f"demo.{phase}-final", demo.graphs[phase].graph_module.graph, request)
