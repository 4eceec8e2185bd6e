"""Weights of four bits with fractional zero points: how near they are, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torchao")

from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

from compilespec.quantization.int4 import quantize_int4

SIZE = 32
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def error(weight: torch.Tensor, stored: Any) -> torch.Tensor:
    return (stored.dequantize().double() - weight.double()).abs()


def test_what_lies_on_such_steps_is_kept() -> None:
    """As weights that were written as GGUF's Q4_1 do: a scale and a least value for each group."""
    steps = torch.randint(0, 16, (7, 3, SIZE)).float()
    steps[..., 0], steps[..., 1] = 0, 15
    weight = (steps * torch.rand(7, 3, 1) + torch.randn(7, 3, 1)).flatten(1)
    assert error(weight, quantize_int4(weight, SIZE)).max() < 1e-5


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_half_a_step_is_the_largest_error(dtype: torch.dtype) -> None:
    weight = torch.randn(9, 2 * SIZE)
    weight[0] = weight[0].abs() + 0.1  # zero is outside
    weight[1, :SIZE], weight[1, SIZE:], weight[2] = 3, 0, -2.5  # no step at all
    weight[3] = 1000 + weight[3]  # and hardly any beside its size
    weight = weight.to(dtype)
    stored = quantize_int4(weight, SIZE)
    groups = weight.float().unflatten(1, (-1, SIZE))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    bound = (0.55 * step + groups.abs().amax(-1) / 1024).repeat_interleave(SIZE, 1)
    assert (error(weight, stored) <= bound).all()
    assert error(weight, stored)[1:3].max() == 0
    assert (stored.dtype, stored.scale.dtype, stored.qdata.dtype) == (dtype, dtype, torch.int8)
    assert (stored.qdata.amin(), stored.qdata.amax()) == (-8, 7)


def test_it_is_nearer_than_whole_zero_points_and_than_none() -> None:
    weight = torch.randn(64, 8 * SIZE)
    mine = error(weight, quantize_int4(weight, SIZE)).square().mean()
    for mapping in (MappingType.SYMMETRIC, MappingType.ASYMMETRIC):
        other = IntxUnpackedToInt8Tensor.from_hp(
            weight, (1, SIZE), getattr(torch, "int4"), mapping_type=mapping  # noqa: B009
        )  # fmt: skip
        assert mine < 0.95 * error(weight, other).square().mean()


def test_groups_must_fit() -> None:
    with pytest.raises(ValueError, match="48 input features are no multiple of 32"):
        quantize_int4(torch.randn(4, 48), SIZE)
