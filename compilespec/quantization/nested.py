"""Eight bits in two planes of four: the upper one is a weight of four bits by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler
from torchao.utils import TorchAOBaseTensor

from compilespec import _torch_compat
from compilespec.errors import InvalidOption
from compilespec.ops.grouped_linear import BLOCK, nested_linear
from compilespec.quantization.grouped import INT4, GroupedIntTensor
from compilespec.quantization.int4 import in_groups

_LEAST, _MOST = -136, 119  # 16 times -8..7, and -8..7
_STEPS = 250.0  # from the least to the largest of a group: zero points are rounded, too


class NestedIntTensor(TorchAOBaseTensor):
    """scale * (upper - zero_point) + lower_scale * lower, both planes int8 of -8..7, in groups."""

    tensor_data_names: ClassVar[list[str]] = [
        "upper",
        "scale",
        "zero_point",
        "lower",
        "lower_scale",
    ]
    tensor_attribute_names: ClassVar[list[str]] = ["dtype"]
    quantizes_rows = True

    def __new__(
        cls,
        upper: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        lower: Tensor,
        lower_scale: Tensor,
        dtype: torch.dtype,
    ) -> Any:
        return _torch_compat.wrapper_tensor(cls, upper.shape, dtype, upper.device)

    def __init__(
        self,
        upper: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        lower: Tensor,
        lower_scale: Tensor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.upper, self.scale, self.zero_point = upper, scale, zero_point
        self.lower, self.lower_scale = lower, lower_scale

    def upper_plane(self) -> GroupedIntTensor:
        """The weight in four bits, of the same memory."""
        size = self.upper.shape[1] // self.scale.shape[1]
        return GroupedIntTensor(
            self.upper, self.scale, self.zero_point, INT4, (1, size), self.dtype, None
        )

    def dequantize(self) -> Tensor:
        """The weight as plain numbers."""
        upper, lower = (
            plane.float().unflatten(1, (self.scale.shape[1], -1))
            for plane in (self.upper, self.lower)
        )
        scale, zero, lower_scale = (
            part.float().unsqueeze(-1) for part in (self.scale, self.zero_point, self.lower_scale)
        )
        return ((upper - zero) * scale + lower * lower_scale).flatten(1).to(self.dtype)


def quantize_nested(weight_NK: Tensor, group_size: int) -> NestedIntTensor:
    """The weight in steps of 1 / 250 of its group's range, which the lower plane counts.

    Raises: ValueError: K is no multiple of the group size.
    """
    dtype, groups = weight_NK.dtype, in_groups(weight_NK, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    middle = (low + high) / 2
    step = torch.maximum((high - low) / _STEPS, middle.abs() / 1024.0)
    step = step.clamp(min=torch.finfo(torch.bfloat16).tiny)
    scale = (16 * step).to(dtype)
    lower_scale = (scale.float() / 16).to(dtype)  # exact
    zero = ((_LEAST + _MOST) / 32 - middle / scale.float()).to(dtype)
    steps = groups / lower_scale.float().unsqueeze(-1) + 16 * zero.float().unsqueeze(-1)
    steps = steps.round().clamp(_LEAST, _MOST)
    upper = ((steps + 8) / 16).floor()
    lower = (steps - 16 * upper).to(torch.int8).flatten(1)
    return NestedIntTensor(upper.to(torch.int8).flatten(1), scale, zero, lower, lower_scale, dtype)


def _linear(
    function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    planes = (weight.upper, weight.scale, bias, weight.zero_point)
    return nested_linear(x, *planes, weight.lower, weight.lower_scale)


NestedIntTensor.implements([torch.ops.aten.linear.default])(_linear)
NestedIntTensor.implements_torch_function([F.linear])(_linear)


@dataclass(frozen=True)
class NestedConfig(AOBaseConfig):
    """Weights of eight bits, of which a drafter can read the upper four (`NestedIntTensor`)."""

    group_size: int = BLOCK
    """Input features that share scales and a zero point."""

    @property
    def in_checkpoints(self) -> AOBaseConfig:
        """Raises: InvalidOption: no checkpoint can say it."""
        raise InvalidOption(
            "int8_nested cannot be stored in a checkpoint; give quantize='int8_nested' when the "
            "full weights are loaded"
        )


@register_quantize_module_handler(NestedConfig)
def _quantize(module: nn.Module, config: NestedConfig) -> nn.Module:
    assert isinstance(module.weight, Tensor)
    weight = quantize_nested(module.weight, config.group_size)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module
