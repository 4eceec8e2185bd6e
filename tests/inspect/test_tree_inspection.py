"""verify, bounds and cost of steps that grow and judge trees."""

from __future__ import annotations

import pytest
import torch

import compilespec
from compilespec import DraftTree
from compilespec.inspect.bounds import prove
from compilespec.inspect.cost import estimate
from compilespec.lowering.host_waits import why_host_waits
from compilespec.program import SpecProgram
from tests.support.drafters import METHODS, traced_info
from tests.support.models import tiny_target
from tools.without_gpu.steps import CUDA, on_cuda

STATIC = DraftTree(choices=[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 2)])
DYNAMIC = DraftTree(top_k=3, depth=3, num_nodes=8)


@pytest.fixture(
    scope="module",
    params=[
        ("eagle3", DYNAMIC, "auto"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                ("eagle3", STATIC, "auto"),
                ("draft_model", STATIC, "auto"),
                ("draft_model", DYNAMIC, "auto"),
                ("eagle3", STATIC, "rejection"),
                ("eagle3", DYNAMIC, "rejection"),
            )
        ),
    ],
    ids=lambda case: f"{case[0]}-{'static' if case[1].choices else 'dynamic'}-{case[2]}",
)
def program(request: pytest.FixtureRequest) -> SpecProgram:
    method, tree, rule = request.param
    model = tiny_target("mistral", torch.float64, num_layers=2)
    drafter = METHODS[method](model, traced_info(model), tree.shape.depth)
    return compilespec.trace(
        model, method, **drafter, draft_tree=tree, acceptance=rule, max_batch_size=5,
        max_seq_len=40, max_prefill_tokens=40,
    )  # fmt: skip


def test_every_pass_agrees(program: SpecProgram) -> None:
    report = compilespec.verify(program, batch_sizes=[1, 5])
    assert report.ok, str(report)
    assert not any(check.skipped for check in report.checks)


def test_every_index_is_proved(program: SpecProgram) -> None:
    report = prove(program)
    assert report.num_open == 0, str(report)
    kept = [bound for bound in report.bounds if bound.node.startswith("write_cache")]
    assert kept
    assert all(bound.status == "proved" for bound in kept)


def test_no_step_waits_for_the_host_on_a_gpu(program: SpecProgram) -> None:
    """Nor does it copy anything between the two: its constants are there."""
    for key, graph in program.graphs.items():
        step = on_cuda(graph.graph_module, graph.fakes, graph.inputs)
        assert why_host_waits(step.graph_module, CUDA) == "", key


def test_a_tree_costs_its_rows(program: SpecProgram) -> None:
    shown = str(estimate(program))
    assert "decode" in shown
    for operator in ("write_cache", "draft_noise", "filtered_probs", "uniform_noise"):
        assert f"not counted: compilespec.{operator}" not in shown
