"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import torch

from compilespec.ops.device import CUDA
from compilespec.ops.packed_linear import pack_weight
from compilespec.passes.aten.prepack_linears import prepack_linears
from compilespec.passes.splice.builder import Splice
from tests.support.hand_graphs import call, code, graph_of
from tests.support.steps import two_linears
from tests.support.untouched import check_left_alone


def test_prepack_linears_packs_weights_on_the_cpu_only():
    gm, ctx, x, weights = two_linears()
    want = call(gm, x, weights["a"], weights["b"])
    assert prepack_linears(Splice(gm, ctx)) == 2
    roles = [node.meta["role"] for node in gm.graph.find_nodes(op="placeholder")]
    assert sorted(roles) == ["packed.a", "packed.b", "x"]
    assert all(
        ctx.inputs[f"packed.{n}"].packed and ctx.inputs[f"packed.{n}"].sources == (n,) for n in "ab"
    )
    inputs = {"x": x} | {f"packed.{name}": pack_weight(w) for name, w in weights.items()}
    for got, one in zip(call(gm, *[inputs[r] for r in roles]), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)
    gm, ctx, *_ = two_linears(traits=CUDA)
    before = code(gm)
    assert prepack_linears(Splice(gm, ctx)) == 0
    assert code(gm) == before


def test_prepack_linears_leaves_products_of_activations_alone():
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    for function in (lambda x, w: (x @ x.t(), x @ w), lambda x, w: x @ (w + 1).t()):
        gm, ctx = graph_of(function, x=("batch", x), w=("weight", w))
        before = code(gm)
        assert prepack_linears(Splice(gm, ctx)) == 0
        assert code(gm) == before


def test_products_without_a_weight_are_left_alone() -> None:
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    case = graph_of(lambda x, w: (x @ x.t(), x @ (w + 1).t()), x=("batch", x), w=("weight", w))
    check_left_alone("prepack_linears", case)
