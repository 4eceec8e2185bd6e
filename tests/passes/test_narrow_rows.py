"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from compilespec.methods.registry import get_method
from compilespec.passes.graph.nodes import find_role, output_node
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.narrow_rows import narrow_rows
from compilespec.passes.splice.rows import Rows, one_row, packed_rows, take_rows
from tests.support.hand_graphs import call, graph_of, reading
from tests.support.steps import emitted_graph, started
from tests.support.untouched import check_left_alone, llama, step


def test_rows_are_taken_where_the_index_says():
    x, last_B = torch.randn(5, 4, 2, 3), torch.tensor([0, 3, 1, 2, 0])
    want = torch.stack([row[n][None] for row, n in zip(x, last_B, strict=True)])
    graph = emitted_graph(one_row, ["x", "index"], sizes=(2, 3))
    assert torch.equal(call(graph, x, last_B), want)
    graph = emitted_graph(one_row, ["x", "index"], sizes=None)
    assert torch.equal(call(graph, x[:, :, 0], last_B), want[:, :, 0])
    packed_1TD, last_R = torch.randn(1, 6, 3), torch.tensor([0, 4, 5])
    graph = emitted_graph(packed_rows, ["x", "index"])
    assert torch.equal(call(graph, packed_1TD, last_R), packed_1TD[:, [0, 4, 5]])


def _mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Every row by itself, behind a sum over rows."""
    x = x.cumsum(1)
    normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    low, high = nn.functional.linear(normed, w).chunk(2, dim=-1)
    gated = torch.cat([nn.functional.silu(low) * high, -low[..., :3]], dim=-1)
    heads = gated[:, 0:, :].reshape(x.shape[0], x.shape[1], 3, 3)
    return x + nn.functional.linear(heads.view(x.shape[0], x.shape[1], 9), v)


def _centred(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The second product reads every row's, for their mean."""
    y = nn.functional.linear(x, w)[..., :9]
    return nn.functional.linear(y - y.mean(1, keepdim=True), v)


def _in_place(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What the first product made is written before it is read: left alone."""
    y = nn.functional.linear(x, w)[..., :9].contiguous()
    y.mul_(2)
    return nn.functional.linear(y, v)


def _torn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """One part is mixed over rows, so that the rows are taken of the other part, not of both."""
    low, high = nn.functional.linear(x, w).chunk(2, dim=-1)
    return nn.functional.linear(torch.cat([low.cumsum(1), high[..., :3] * 2], dim=-1), v)


@pytest.mark.parametrize(
    ("function", "products"),
    [(_mlp, 2), (_centred, 1), (_in_place, 0), (_torn, 1)],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.parametrize("form", ["one of each", "packed", "last"])
def test_a_choice_of_rows_moves_up_to_where_rows_meet(function, products, form):
    shape = (1, 11, 8) if form == "packed" else (3, 4, 8)
    inputs = torch.randn(shape), torch.randn(12, 8), torch.randn(8, 9)
    gm = fx.symbolic_trace(function)
    ctx = graph_of(lambda x: x + 1, x=("batch", torch.zeros(1)))[1]
    ctx.weights.update(w=inputs[1], v=inputs[2])
    _note_shapes(gm, inputs)
    end = output_node(gm)
    last = torch.tensor([0, 2, 10]) if form == "packed" else torch.tensor([1, 3, 0])
    gm.register_buffer("index", last)
    with gm.graph.inserting_before(end):
        index = gm.graph.get_attr("index")
    rows = Rows(index=None if form == "last" else index, is_packed=form == "packed")
    step, source = Splice(gm, ctx), end.args[0]
    step.roles.logits = take_rows(step, step.value(source), rows)
    end.args = (find_role(gm, "logits"),)
    want = call(gm, *inputs)
    assert narrow_rows(step) == products
    assert find_role(gm, "logits") is end.args[0]
    gm.graph.lint()
    torch.testing.assert_close(call(gm, *inputs), want)
    assert narrow_rows(step) == 0  # nothing is left to move


def _note_shapes(gm: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
    """Shapes as splicing leaves them, the batch symbolic; weights are placeholders with a role."""
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Noting(gm).run(*[value.clone() for value in inputs])
    for node, value in values.items():
        node.meta["custom"] = {"pass": "trace"}
        if node.op == "placeholder" and node.name != "x":
            node.meta["role"] = node.name
        elif isinstance(value, Tensor):
            node.meta["example"] = ((None, *value.shape[1:]), value.dtype)


def test_a_last_layer_runs_on_the_rows_that_go_on(parts):
    """Its o, gate, up and down products: a drafter's, and the target's where none taps it."""
    for phase in ("decode", "prefill"):
        gm, ctx = started(parts, phase, "narrow_rows")
        assert narrow_rows(Splice(gm, ctx)) == 4
    none = {"capabilities": get_method("none").capabilities, "draft": {}, "drafter": reading()}
    gm, ctx = started(parts, "prefill", "narrow_rows", **none)
    assert narrow_rows(Splice(gm, ctx)) == 4
    gm, ctx = started(parts, "decode", "narrow_rows", **none)
    assert narrow_rows(Splice(gm, ctx)) == 0


def test_a_last_layer_that_is_tapped_is_left_alone() -> None:
    """All its rows are read: only the norm behind it has rows that are not."""
    done = ("tap_hidden_states", "read_state", "narrow_logits", "insert_paged_attention")
    drafter = reading(aux_layers=(llama().num_attention_layers,))
    check_left_alone("narrow_rows", step("prefill", *done, drafter=drafter))
