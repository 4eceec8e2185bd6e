"""Grouped weights times rows in int8 blocks: definition, bitwise equal rows, layouts, refusals."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compilespec.ops import load_kernels
from compilespec.ops.grouped_linear import reference
from compilespec.ops.quantized_linear import LAYOUTS

OPS = torch.ops.compilespec
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative to |x||w|
FORMS = [(4, 32), (4, 64), (8, 16), (8, 32), (8, 128)]  # bits, input features of a group
SHAPES = [(1, 128), (33, 256), (100, 384)]  # N, K


class Weight(NamedTuple):
    values: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    def packed(self, *, has_zero: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        layout = LAYOUTS["quad_nibbles" if self.bits == 4 else "quad_bytes"]
        zero = LAYOUTS["groups"](self.zero) if has_zero else None
        return layout(self.values), LAYOUTS["groups"](self.scale), zero

    def wide(self) -> Tensor:
        """Magnitudes."""
        size = self.values.shape[1] // self.scale.shape[1]
        most = self.values.double().abs() + self.zero.double().abs().repeat_interleave(size, 1)
        return most * self.scale.double().repeat_interleave(size, 1)


def weight_of(bits: int, group: int, shape: tuple[int, int], dtype: torch.dtype) -> Weight:
    most, groups = 2 ** (bits - 1), (shape[0], shape[1] // group)
    values = torch.randint(-most, most, shape, dtype=torch.int8)
    values[0], values[-1] = -most, most - 1
    return Weight(
        values, torch.rand(groups).to(dtype) + 0.1, (torch.randn(groups) * 4).to(dtype), bits
    )


@pytest.fixture
def kernels() -> None:
    if not load_kernels():
        pytest.skip("no C++ compiler: the references serve, and promise no bitwise rows")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_lose_nothing(shape: tuple[int, int]) -> None:
    for bits, unpack in ((4, reference.unpack_quad_nibbles), (8, reference.unpack_quad_bytes)):
        weight = weight_of(bits, 32, shape, torch.bfloat16)
        packed, scale, _ = weight.packed(has_zero=False)
        assert packed.nbytes == -(-shape[0] // 16) * 16 * shape[1] * bits // 8
        assert torch.equal(unpack(packed, shape[0]), weight.values)
        assert scale.dtype == torch.bfloat16  # as it is stored
    assert LAYOUTS["groups"](weight.scale.half()).dtype == torch.float32


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_the_definition_and_rows_are_what_they_are_alone(
    dtype: torch.dtype, form: tuple[int, int], kernels: None
) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        weight, bias_N = weight_of(*form, shape, dtype), torch.randn(shape[0]).to(dtype)
        for rows in (0, 1, 2, 5, 6, 9, 23):
            x = (torch.randn(rows, shape[1]) * 3).to(dtype)
            x[:1, :40] = 0
            for has_zero, bias in ((False, None), (True, bias_N)):
                packed = weight.packed(has_zero=has_zero)
                got = OPS.packed_grouped_linear(x, *packed[:2], bias, shape[0], packed[2])
                zero = weight.zero if has_zero else None
                parts = (weight.values, weight.scale, bias, weight.bits, zero)
                size = x.double().abs() @ weight.wide().t() + 1
                assert got.dtype == dtype
                want = OPS.grouped_linear(x, *parts)
                assert ((got.double() - want.double()).abs() <= 4 * TOLERANCE[dtype] * size).all()
                alone = [
                    OPS.packed_grouped_linear(row, *packed[:2], bias, shape[0], packed[2])
                    for row in x.split(1)
                ]
                assert torch.equal(torch.cat([got[:0], *alone]), got)


def test_the_definition_is_near_the_product_of_full_weights() -> None:
    """Rounding rows to 255 steps in blocks costs half a percent of a product."""
    torch.manual_seed(0)
    weight = weight_of(4, 32, (64, 512), torch.float32)
    x = torch.randn(16, 512)
    wide = (weight.values - weight.zero.repeat_interleave(32, 1)) * weight.scale.repeat_interleave(
        32, 1
    )
    want, got = (
        x @ wide.t(),
        OPS.grouped_linear(x, weight.values, weight.scale, None, 4, weight.zero),
    )
    assert 1e-4 < (got - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_its_own_row_alone(bad: float, kernels: None) -> None:
    weight = weight_of(4, 32, (33, 128), torch.float32)
    packed, x = weight.packed(has_zero=True), torch.randn(3, 128)
    clean = OPS.packed_grouped_linear(x, *packed[:2], None, 33, packed[2])
    x[1, 70] = bad
    got = OPS.packed_grouped_linear(x, *packed[:2], None, 33, packed[2])
    assert got[1].isnan().all()
    assert OPS.grouped_linear(x, weight.values, weight.scale, None, 4, weight.zero)[1].isnan().all()
    assert torch.equal(got[::2], clean[::2])


def test_threads_change_nothing(kernels: None) -> None:
    weight, before = weight_of(8, 32, (1000, 256), torch.bfloat16), torch.get_num_threads()
    packed, x = weight.packed(has_zero=False), torch.randn(70, 256).bfloat16()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(OPS.packed_grouped_linear(x, *packed[:2], None, 1000, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_wrong_arguments_are_named(kernels: None) -> None:
    weight = weight_of(4, 32, (33, 128), torch.float32)
    packed, scale, zero = weight.packed(has_zero=True)
    x = torch.randn(2, 128)
    for arguments in (
        (x[:, :100], packed, scale, None, 33, zero),
        (x.double(), packed, scale, None, 33, zero),
        (x, packed[:, 1:], scale, None, 33, zero),
        (x, packed, scale.half(), None, 33, None),
        (x, packed, scale, None, 33, zero[:, 1:]),
        (x, packed, scale, torch.zeros(7), 33, zero),
        (x, packed, LAYOUTS["groups"](torch.ones(33, 3)), None, 33, None),
        (x, packed, LAYOUTS["groups"](torch.ones(33, 8)), None, 33, None),  # groups of 16, 4 bits
    ):
        with pytest.raises(RuntimeError, match="packed_grouped_linear"):
            OPS.packed_grouped_linear(*arguments)


def test_operators_keep_their_promises(kernels: None) -> None:
    weight = weight_of(8, 32, (33, 128), torch.float32)
    packed, scale, zero = weight.packed(has_zero=True)
    x = torch.randn(2, 128)
    torch.library.opcheck(
        OPS.grouped_linear.default, (x, weight.values, weight.scale, None, 8, weight.zero)
    )
    torch.library.opcheck(OPS.packed_grouped_linear.default, (x, packed, scale, None, 33, zero))
