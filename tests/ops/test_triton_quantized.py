"""quantized_linear: reference and Triton kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilespec.ops.quantized_linear.reference import (
    pack_nibbles,
    quantized_linear_reference,
    unpack_nibbles,
)

pytest.importorskip("tests.support.triton_interpreter")
pytestmark = pytest.mark.interp
kernel = pytest.importorskip("compilespec.ops.quantized_linear.kernel")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative to |x||w|


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def float8(*shape: int) -> Tensor:
    """Every finite value, subnormal ones and both zeros, over and over."""
    values = torch.arange(256, dtype=torch.uint8)
    values = values[(values & 0x7F) != 0x7F]
    repeated = values.repeat(-(-shape[0] * shape[1] // len(values)))
    return repeated[: shape[0] * shape[1]].view(shape).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("rows", "shape", "groups", "weight"),
    [
        ((1,), (1, 32), 1, int8),
        ((3, 5), (33, 96), 3, int8),
        ((2, 1), (70, 100), 1, float8),
        ((33,), (65, 48), 1, float8),
        ((2,), (5, 24), 3, int8),  # groups of 8: the reference serves
        ((0, 4), (9, 16), 1, int8),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_products_are_those_of_the_reference(rows, shape, groups, weight, dtype):
    x, weight_NK = torch.randn(*rows, shape[1]).to(dtype), weight(*shape)
    scale = torch.rand(shape[0], groups) * 0.01 + 0.001
    bias = torch.randn(shape[0]).to(dtype) if groups == 1 else None
    zero = torch.randn(shape[0], groups).to(dtype) if weight is int8 else None
    want = quantized_linear_reference(x, weight_NK, scale, bias, 8, zero)
    got = kernel.quantized_linear(x, weight_NK, scale, bias, 8, zero)
    assert got.dtype == dtype
    assert got.is_contiguous()
    wide = scale.repeat_interleave(shape[1] // groups, 1) * (weight_NK.float().abs() + 4)
    bound = TOLERANCE[dtype] * (x.float().abs() @ wide.t() + (0 if bias is None else bias.abs()))
    assert ((got.float() - want.float()).abs() <= bound).all()


def int4(*shape: int) -> Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("rows", "shape", "groups"),
    [
        ((1,), (1, 32), 1),
        ((3, 5), (33, 96), 3),
        ((17,), (70, 256), 4),
        ((2,), (70, 160), 1),  # the last block of features is cut
        ((2,), (5, 192), 2),  # groups of 96: blocks of 32
        ((2,), (5, 64), 4),  # groups of 16: the reference serves
        ((0, 4), (9, 64), 1),
    ],
    ids=str,
)
def test_products_of_four_bits_are_those_of_the_reference(rows, shape, groups, dtype):
    x, weight_NK = torch.randn(*rows, shape[1]).to(dtype), int4(*shape)
    scale = torch.rand(shape[0], groups) * 0.01 + 0.001
    bias = torch.randn(shape[0]).to(dtype) if groups != 3 else None
    zero = torch.randn(shape[0], groups).to(dtype) if groups in (2, 3) else None
    want = quantized_linear_reference(x, weight_NK, scale, bias, 4, zero)
    got = kernel.int4_linear(x, pack_nibbles(weight_NK), scale, bias, zero)
    assert got.dtype == dtype
    assert got.is_contiguous()
    wide = scale.repeat_interleave(shape[1] // groups, 1) * (weight_NK.float().abs() + 4)
    bound = TOLERANCE[dtype] * (x.float().abs() @ wide.t() + (0 if bias is None else bias.abs()))
    assert ((got.float() - want.float()).abs() <= bound).all()


def test_four_bits_are_packed_by_rows_and_widened_exactly():
    """Packed rows are rows, so that merged weights are packed as their parts would be."""
    weight_NK = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 4)
    weight_NK[1] = weight_NK[1].flip(0)
    packed = pack_nibbles(weight_NK)
    assert (packed.shape, packed.dtype) == ((3, 32), torch.uint8)
    assert torch.equal(unpack_nibbles(packed), weight_NK)
    assert torch.equal(torch.cat([pack_nibbles(weight_NK[:1]), packed[1:]]), packed)
    got = kernel.int4_linear(torch.eye(64), packed, torch.ones(3, 2), None)
    assert torch.equal(got.t(), weight_NK.float())


def test_the_operator_of_four_bits_is_one():
    weight_NK, scale = int4(6, 64), torch.rand(6, 2)
    arguments = (torch.randn(2, 3, 64), pack_nibbles(weight_NK), scale, torch.randn(6))
    torch.library.opcheck(torch.ops.compilespec.int4_linear.default, arguments)
    want = quantized_linear_reference(arguments[0], weight_NK, scale, arguments[3], 4)
    assert torch.equal(torch.ops.compilespec.int4_linear(*arguments), want)


def test_float8_is_widened_exactly():
    """A row of the identity picks each weight out as it is; NaN stays NaN."""
    weight_NK = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    got = kernel.quantized_linear(torch.eye(16), weight_NK[:, :], torch.ones(16, 1), None, 8)
    finite = weight_NK.float().isfinite().all(1)
    assert torch.equal(got.t()[finite], weight_NK.float()[finite])
    assert got.t()[~finite].isnan().any(1).all()


def test_a_strided_input_is_read_in_place():
    x, weight_NK, scale = torch.randn(32, 6).t()[:, :32], int8(7, 32), torch.rand(7, 1)
    got = kernel.quantized_linear(x, weight_NK, scale, None, 8)
    torch.testing.assert_close(got, quantized_linear_reference(x, weight_NK, scale, None, 8))
