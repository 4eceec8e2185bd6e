"""Products with quantized weights: their definition, bitwise equal rows, their layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compilespec.ops import load_kernels
from compilespec.ops.quantized_linear import LAYOUTS, reference

OPS = torch.ops.compilespec
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative to |x||w|
SHAPES = [(1, 32), (15, 160), (33, 96), (100, 384), (256, 800)]  # N, K
GROUPS = {32: 32, 64: 32, 160: 32, 96: 32, 384: 128, 800: 32}  # of K, input features of a group
ODD = (48, 771)  # for weights without groups
ROWS = (1, 2, 3, 5, 6, 7, 13, 24, 48, 97, 193)


class Weight(NamedTuple):
    values: Tensor
    scale: Tensor
    bits: int
    zero: Tensor | None = None

    def packed(self) -> tuple[Tensor, Tensor]:
        layout = "int4" if self.bits == 4 else "bytes"
        return LAYOUTS[layout](self.values), LAYOUTS["scale"](self.scale)

    def packed_zero(self) -> Tensor | None:
        return None if self.zero is None else LAYOUTS["scale"](self.zero)

    def wide(self) -> Tensor:
        values, size = self.values.double(), self.values.shape[1] // self.scale.shape[1]
        if self.zero is not None:
            values = values - self.zero.double().repeat_interleave(size, 1)
        return values * self.scale.double().repeat_interleave(size, 1)


def _int8(shape: tuple[int, int]) -> Weight:
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    return Weight(values, torch.rand(shape[0], 1) * 0.01 + 0.001, 8)


def _grouped_int8(shape: tuple[int, int]) -> Weight:
    return _int8(shape)._replace(scale=torch.rand(shape[0], shape[1] // GROUPS[shape[1]]) + 0.1)


def _int4(shape: tuple[int, int]) -> Weight:
    values = torch.randint(-8, 8, shape, dtype=torch.int8)
    scale = torch.rand(shape[0], shape[1] // GROUPS[shape[1]]) + 0.1
    return Weight(values, scale.bfloat16(), 4)


def _zeros(shape: tuple[int, int]) -> Weight:
    """Fractions for groups of four bits, whole numbers for rows of eight."""
    if shape[1] == 160:
        return _int8(shape)._replace(zero=torch.randint(-128, 128, (shape[0], 1)).to(torch.int8))
    weight = _int4(shape)
    return weight._replace(zero=(torch.randn(weight.scale.shape) * 8).bfloat16())


def _float8(shape: tuple[int, int]) -> Weight:
    values = (torch.randn(shape) * 100).clamp(-448, 448)
    values.view(-1)[:3] = torch.tensor([2.0**-9, -(2.0**-7), 0.0])  # subnormal
    return Weight(values.to(torch.float8_e4m3fn), torch.rand(shape[0], 1) * 0.01, 8)


UNGROUPED = ("int8", "float8")
KINDS: dict[str, Callable[[tuple[int, int]], Weight]] = {
    "int8": _int8, "grouped_int8": _grouped_int8, "int4": _int4, "zeros": _zeros,
    "float8": _float8,
}  # fmt: skip


@pytest.fixture
def kernels():
    if not load_kernels():
        pytest.skip("no C++ compiler: the references serve, and promise no bitwise rows")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_lose_nothing(shape):
    for make in KINDS.values():
        weight = make(shape)
        packed, scale = weight.packed()
        assert packed.is_contiguous()
        unpack = reference.unpack_int4 if weight.bits == 4 else reference.unpack_bytes
        again = unpack(packed, shape[0])
        assert torch.equal(again.view(torch.int8), weight.values.view(torch.int8))
        assert scale.dtype == torch.float32
        assert scale.shape == (-(-shape[0] // 16), weight.scale.shape[1], 16)
    values = _int8(shape).values
    assert torch.equal(reference.unpack_quads(LAYOUTS["quads"](values), *shape), values)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition(kind, dtype):
    for shape in [*SHAPES, *([ODD] if kind in UNGROUPED else [])]:
        weight, bias_N = KINDS[kind](shape), torch.randn(shape[0]).to(dtype)
        packed, scale = weight.packed()
        for rows in (0, 1, 6, 13):
            x = torch.randn(rows, shape[1]).to(dtype)
            size = x.double().abs() @ weight.wide().abs().t() + 1
            for bias in (None, bias_N):
                want = x.double() @ weight.wide().t() + (0 if bias is None else bias.double())
                zero = weight.packed_zero()
                got = OPS.packed_quantized_linear(x, packed, scale, bias, shape[0], zero)
                assert got.dtype == dtype
                assert ((got.double() - want).abs() <= TOLERANCE[dtype] * size).all()
                plain = OPS.quantized_linear(
                    x, weight.values, weight.scale, bias, weight.bits, weight.zero
                )
                assert ((plain.double() - want).abs() <= TOLERANCE[dtype] * size).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dynamic_int8_is_its_reference_exactly(dtype, kernels):
    for shape in [*SHAPES, ODD]:
        weight, bias_N = _int8(shape), torch.randn(shape[0]).to(dtype)
        packed, scale = LAYOUTS["quads"](weight.values), LAYOUTS["scale"](weight.scale)
        x = torch.randn(13, shape[1]).to(dtype)
        x[0], x[1] = 0, x[1] * 1e-6  # the smallest scale
        for bias in (None, bias_N):
            got = OPS.packed_dynamic_int8_linear(x, packed, scale, bias, shape[0])
            want = OPS.dynamic_int8_linear(x, weight.values, weight.scale, bias)
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [*KINDS, "dynamic"])
def test_rows_are_bitwise_independent(kind, kernels, threads):
    """1 to 48 rows and more, in every split of the work among threads."""
    weight = KINDS.get(kind, _int8)((300, 800))
    packed, scale = weight.packed()
    if kind == "dynamic":
        packed = LAYOUTS["quads"](weight.values)
    op = OPS.packed_dynamic_int8_linear if kind == "dynamic" else OPS.packed_quantized_linear
    zero = () if weight.zero is None else (weight.packed_zero(),)
    x = torch.randn(193, 800).bfloat16()
    threads(1)
    alone = torch.cat([op(x[i : i + 1], packed, scale, None, 300, *zero) for i in range(193)])
    for num_threads in (1, 2, 3):
        threads(num_threads)
        for rows in ROWS:
            assert torch.equal(op(x[:rows], packed, scale, None, 300, *zero), alone[:rows])


def test_special_values_stay_in_their_row(kernels):
    weight = _int8((20, 32))
    packed, scale = weight.packed()
    quads = LAYOUTS["quads"](weight.values)
    x = torch.randn(5, 32)
    for special in (float("nan"), float("inf")):
        bad = x.clone()
        bad[2, 3] = special
        for op, layout in ((OPS.packed_quantized_linear, packed),
                           (OPS.packed_dynamic_int8_linear, quads)):  # fmt: skip
            clean, got = op(x, layout, scale, None, 20), op(bad, layout, scale, None, 20)
            assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
            assert not got[2].isfinite().any()


def test_wrong_shapes_are_refused(kernels):
    weight = _int8((20, 64))
    packed, scale = weight.packed()
    x = torch.randn(2, 64)
    for arguments in (
        (x[:, :32], packed, scale, None, 20),
        (x, packed, scale, None, 40),
        (x.double(), packed, scale, None, 20),
        (x, packed, scale, torch.ones(19), 20),
        (x, packed, torch.ones(2, 3, 16), None, 20),
    ):
        with pytest.raises(RuntimeError, match="packed_quantized_linear"):
            OPS.packed_quantized_linear(*arguments)
        with pytest.raises(RuntimeError, match="packed_dynamic_int8_linear"):
            OPS.packed_dynamic_int8_linear(*arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind):
    weight = KINDS[kind]((33, 64))
    packed, scale = weight.packed()
    # the schema test multiplies every argument, which torch cannot do with float8
    tests = ("test_schema",) * (kind != "float8") + ("test_faketensor",)
    for shape in ((64,), (2, 3, 64), (0, 64)):
        x, bias = torch.randn(shape), torch.randn(33)
        for op, arguments in (
            (
                OPS.packed_quantized_linear.default,
                (x, packed, scale, bias, 33, weight.packed_zero()),
            ),
            (
                OPS.quantized_linear.default,
                (x, weight.values, weight.scale, None, weight.bits, weight.zero),
            ),
        ):
            torch.library.opcheck(op, arguments, test_utils=tests)
        if kind == "int8":
            quads = LAYOUTS["quads"](weight.values)
            plain = (x, weight.values, weight.scale, bias)
            torch.library.opcheck(OPS.dynamic_int8_linear.default, plain)
            torch.library.opcheck(
                OPS.packed_dynamic_int8_linear.default, (x, quads, scale, None, 33)
            )


@pytest.mark.parametrize("kind", UNGROUPED)
@pytest.mark.parametrize("size", [1e-39, 1e-37, 1.0], ids=str)
def test_rows_of_subnormal_numbers_are_what_they_are_alone(kind, size, kernels):
    """Matrix instructions take them for zeros, so a row alone must, too."""
    weight = KINDS[kind](ODD)
    packed, scale = weight.packed()
    x = (torch.randn(17, ODD[1]) * size).bfloat16()
    together = OPS.packed_quantized_linear(x, packed, scale * 1000, None, ODD[0])
    for row in range(17):
        alone = OPS.packed_quantized_linear(x[row : row + 1], packed, scale * 1000, None, ODD[0])
        assert torch.equal(alone, together[row : row + 1])
