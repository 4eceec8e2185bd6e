"""Stages, tables and shapes of every family's graphs, on random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import compilespec
from compilespec.inspect.graphs import GraphStage, PhaseStages
from compilespec.inspect.page import render_page
from compilespec.inspect.source import render_python
from compilespec.inspect.table import Row, count_operators, difference, rows_of
from compilespec.passes.graph.fakes import EXAMPLE_SIZES
from tests.support.models import FAMILIES, VOCAB, tiny_target

DEFAULT = ("plain",)  # a module that transformers does not know


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in DEFAULT else pytest.mark.slow)
        for family in (*FAMILIES, "plain")
    ],
)
def test_every_family_is_dumped(family: str) -> None:
    program = compilespec.trace(tiny_target(family, num_layers=2), "none", max_seq_len=75)
    stages = PhaseStages(program.graphs["decode"])
    tables = {stage.name: rows_of(stage) for stage in stages}
    for name in ("start", "commit_state"):
        (logits,) = [row for row in tables[name] if row.role == "logits" and row.op != "output"]
        assert logits.shape == ("B", 1, VOCAB)
    counts = count_operators(tables["check_mutations"])
    assert counts["compilespec.paged_attention.default"] == 2
    assert all(row.made_by for table in tables.values() for row in table)
    last = stages[-1]
    module: dict[str, Any] = {"__name__": "graph"}
    exec(render_python(last, family), module)
    with torch.no_grad():
        emitted, num_emitted = module["Graph"]()(*module["example_inputs"](B=3).values())
    assert emitted.shape == (3, 1)
    assert num_emitted.tolist() == [1, 1, 1]
    page = render_page([(stage, tables[stage.name]) for stage in stages], "<b>")
    assert "<title>&lt;b&gt;</title>" in page


def test_batch_dimensions_are_letters_before_the_retrace() -> None:
    """ngram pads a history of B rows: on fakes `pad` can turn a symbol into its number."""
    program = compilespec.trace(tiny_target("qwen3", num_layers=1), "ngram", max_seq_len=75)
    for phase in program.graphs.values():
        for _, stage in zip((None, *phase.splice_records), PhaseStages(phase), strict=False):
            shapes = [row.shape for row in rows_of(stage) if row.shape]
            numbers = set(EXAMPLE_SIZES.values()) & {size for shape in shapes for size in shape}
            assert not numbers, (phase.phase, stage.name)


def _stage(graph: fx.Graph) -> GraphStage:
    return GraphStage(name="x", graph=graph, owner=torch.nn.Module(), values={}, symbols={})


def test_difference_pairs_nodes_by_name() -> None:
    old, new = fx.Graph(), fx.Graph()
    for graph, number in ((old, 1), (new, 2)):
        x = graph.placeholder("x")
        y = graph.call_function(torch.add, (x, number), name="y")
        if graph is new:
            y = graph.call_function(torch.neg, (y,), name="z")
        graph.output(y)
    changes = list(difference(rows_of(_stage(old)), rows_of(_stage(new))))
    assert [change.sign for change in changes] == [" ", "~", "+", "~"]


def test_constants_are_written_out() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, graph.get_attr("table"))),))
    owner = torch.nn.Module()
    owner.register_buffer("table", torch.tensor([0.1, float("-inf"), 3.0]))
    value = torch.empty(3)
    stage = GraphStage(
        name="x", graph=graph, owner=owner, symbols={}, values={next(iter(graph.nodes)): value}
    )
    module: dict[str, Any] = {"__name__": "graph"}
    exec(render_python(stage, "constants"), module)
    (result,) = module["Graph"]()(torch.zeros(3))
    assert torch.equal(result, owner.table)


def test_a_scalar_has_an_example_too() -> None:
    """Gemma's scale of the embedding is one."""
    graph = fx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    graph.output((graph.call_function(torch.mul, (x, scale)),))
    values = {x: torch.empty(2, 3), scale: torch.empty((), dtype=torch.float64)}
    stage = GraphStage(name="x", graph=graph, owner=torch.nn.Module(), symbols={}, values=values)
    module: dict[str, Any] = {"__name__": "graph"}
    exec(render_python(stage, "scaled"), module)
    inputs = module["example_inputs"]()
    assert inputs["scale"].dtype == torch.float64
    (result,) = module["Graph"]()(*inputs.values())
    assert torch.equal(result, inputs["x"] * inputs["scale"])


def test_a_row_of_a_later_copy_says_so() -> None:
    fields: dict[str, Any] = dict.fromkeys(
        ("name", "op", "target", "args", "dtype", "role", "source", "made_by", "module_class"), ""
    )
    row = Row(**fields, shape=None, module="layers.0.mlp", fragment="draft.forward", copy=1)
    assert row.place == "draft.forward#2 layers.0.mlp"
