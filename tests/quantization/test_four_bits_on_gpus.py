"""Weights of four bits on GPUs: merged, packed by rows, and never widened in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilespec.ops.device import CUDA
from compilespec.ops.quantized_linear import quantized_linear
from compilespec.passes.aten.merge_projections import merge_projections
from compilespec.passes.aten.prepack_linears import prepack_linears
from compilespec.passes.splice.builder import Splice
from compilespec.quantization.configs import NAMES
from compilespec.runtime.weights import materialise
from tests.support.hand_graphs import call, graph_of

INT4 = torch.ops.compilespec.int4_linear.default


def two_products(x: Tensor, a: Tensor, b: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
    sa, sb, za, zb = (*parts, None, None)[:4]
    return quantized_linear(x, a, sa, None, 4, za), quantized_linear(x, b, sb, None, 4, zb)


def with_zeros(
    x: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, za: Tensor, zb: Tensor
) -> tuple[Tensor, Tensor]:
    return two_products(x, a, b, sa, sb, za, zb)


def without_zeros(x: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> tuple[Tensor, Tensor]:
    return two_products(x, a, b, sa, sb)


def weights(depth: int, groups: int, has_zeros: bool) -> list[Tensor]:
    ints = [torch.randint(-8, 8, (rows, depth), dtype=torch.int8) for rows in (5, 3)]
    numbers = [torch.rand(rows, groups) for _ in range(1 + has_zeros) for rows in (5, 3)]
    return [*ints, *numbers]


@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zero_points"])
@pytest.mark.parametrize(("depth", "groups", "is_packed"), [(192, 3, True), (48, 3, False)])
def test_merged_weights_are_packed(
    depth: int, groups: int, is_packed: bool, has_zeros: bool
) -> None:
    """Groups of 64, and of 16, which stay as they are."""
    x, parts = torch.randn(2, depth), weights(depth, groups, has_zeros)
    names = dict(zip(("a", "b", "sa", "sb", "za", "zb"), parts, strict=False))
    given = {name: ("weight", tensor) for name, tensor in names.items()}
    products = with_zeros if has_zeros else without_zeros
    gm, ctx = graph_of(products, x=("batch", x), **given)
    ctx.traits = CUDA
    assert merge_projections(Splice(gm, ctx)) == 1
    assert prepack_linears(Splice(gm, ctx)) == is_packed
    assert len(gm.graph.find_nodes(op="call_function", target=INT4)) == is_packed
    inputs = [ctx.inputs[node.meta["role"]] for node in gm.graph.find_nodes(op="placeholder")]
    assert [spec.packed for spec in inputs if spec.sources == ("a", "b")] == [
        "nibbles" if is_packed else ""
    ]
    bound = [x if s.kind == "batch" else materialise(s, names) for s in inputs]
    num_bytes = sum(tensor.nbytes for tensor in bound if not tensor.is_floating_point())
    assert num_bytes == 8 * depth // (2 if is_packed else 1)
    torch.testing.assert_close(call(gm, *bound), two_products(x, *parts))


def test_cuda_has_groups_that_fill_a_sector() -> None:
    config = NAMES["int4_weight_only"](torch.device("cuda"))
    assert config.group_size % 64 == 0
