"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compilespec.ops.device import traits_of
from compilespec.passes.aten.merge_projections import merge_projections
from compilespec.passes.splice.builder import Splice
from compilespec.program import InputSpec
from tests.support.hand_graphs import call, code, graph_of
from tests.support.steps import ATEN, targets, two_linears
from tests.support.untouched import check_left_alone


def test_merge_projections_makes_one_product():
    gm, ctx, x, weights = two_linears()
    want = call(gm, x, weights["a"], weights["b"])
    assert merge_projections(Splice(gm, ctx)) == 1
    assert targets(gm).count(ATEN.mm.default) == 1
    assert ctx.inputs["a+b"] == InputSpec(name="a+b", kind="weight", sources=("a", "b"))
    gm.graph.lint()
    inputs = {
        "x": x,
        "a": weights["a"],
        "b": weights["b"],
        "a+b": torch.cat([weights["a"], weights["b"]]),
    }
    roles = [node.meta["role"] for node in gm.graph.find_nodes(op="placeholder")]
    for got, one in zip(call(gm, *[inputs[r] for r in roles]), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)


def test_merge_projections_copies_what_is_viewed_across_rows():
    """Heads of all tokens in one list, as gated norms take them; heads of each token need none."""
    weights = {"a": torch.randn(8, 4), "b": torch.randn(6, 4)}
    x = torch.randn(6, 4)

    def function(x, a, b):
        first, second = nn.functional.linear(x, a), nn.functional.linear(x, b)
        heads = second.reshape(x.shape[0], 3, 2)
        return first.reshape(x.shape[0], 2, 4).reshape(-1, 4) * 2, heads + 1, heads.reshape(-1)

    placed = {name: ("weight", weight) for name, weight in weights.items()}
    gm, ctx = graph_of(function, x=("batch", x), **placed)
    want = call(gm, x, *weights.values())
    assert merge_projections(Splice(gm, ctx)) == 1
    assert targets(gm).count(ATEN.clone.default) == 2
    gm.graph.lint()
    inputs = {"x": x, **weights, "a+b": torch.cat([*weights.values()])}
    roles = [node.meta["role"] for node in gm.graph.find_nodes(op="placeholder")]
    for got, one in zip(call(gm, *[inputs[r] for r in roles]), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)


def test_merge_projections_leaves_alone_what_is_not_a_group():
    gm, ctx, *_ = two_linears(
        traits=traits_of(torch.device("meta"))
    )  # off where nothing runs: on the meta device
    before = code(gm)
    assert merge_projections(Splice(gm, ctx)) == 0
    assert code(gm) == before
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    for function in (
        lambda x, a, b: nn.functional.linear(nn.functional.linear(x, a), b),  # one feeds the other
        lambda x, a, b: (nn.functional.linear(x, a), nn.functional.linear(x, b, b[0])),  # a bias
        lambda x, a, b: (x @ a.t(), x @ (b * 2).t()),  # not a weight
        lambda x, a, b: (x @ a, x @ b),  # not transposed
        lambda x, a, b: (
            nn.functional.linear(x, a),
            nn.functional.linear(x, a) + b[0],
        ),  # one weight twice
    ):
        gm, ctx = graph_of(function, x=("batch", x), a=("weight", w), b=("weight", w + 1))
        assert merge_projections(Splice(gm, ctx)) == 0


def test_a_product_that_feeds_the_other_is_left_alone() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, a), b)

    x, w = torch.randn(2, 4), torch.randn(4, 4)
    case = graph_of(function, x=("batch", x), a=("weight", w), b=("weight", w + 1))
    check_left_alone("merge_projections", case)
