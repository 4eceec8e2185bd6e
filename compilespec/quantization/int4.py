"""Four bits with a scale and a zero point for each group, as torchao stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import (
    IntxUnpackedToInt8Tensor,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
)
from torchao.quantization.transform_module import register_quantize_module_handler

from compilespec.errors import InvalidOption
from compilespec.quantization.grouped import INT4, GroupedIntTensor

_LEAST, _MOST = -8, 7
_FARTHEST = 1024.0  # largest zero point in steps, which float16 can hold


@dataclass(frozen=True)
class Int4Config(AOBaseConfig):
    """Weights in 16 equal steps from the least to the largest of their group.

    Zero points are fractions, so that both ends are exact, and so is every weight that was stored
    in such steps before (GGUF's Q4_1).  torchao's zero points are whole numbers, which shifts each
    group by up to half a step.
    """

    group_size: int
    """Input features that share a scale and a zero point."""

    quantizes_rows: bool = False
    """Products quantize their rows, too, in blocks of 32 (`compilespec::grouped_linear`)."""

    @property
    def in_checkpoints(self) -> IntxWeightOnlyConfig:
        """torchao's nearest config, by which transformers recognises stored weights.

        Raises: InvalidOption where products quantize rows, which no checkpoint can say.
        """
        if self.quantizes_rows:
            raise InvalidOption(
                "int4_dynamic cannot be stored in a checkpoint; save 'int4_weight_only', or give "
                "quantize='int4_dynamic' when the full weights are loaded"
            )
        return IntxWeightOnlyConfig(
            weight_dtype=INT4,
            granularity=PerGroup(self.group_size),
            mapping_type=MappingType.ASYMMETRIC,
        )


def in_groups(weight_NK: Tensor, group_size: int) -> Tensor:
    """The weight as float32 [N, K / group_size, group_size].

    Raises: ValueError: K is no multiple of the group size.
    """
    depth = weight_NK.shape[1]
    if depth % group_size:
        raise ValueError(f"{depth} input features are no multiple of {group_size}")
    return weight_NK.detach().float().unflatten(1, (-1, group_size))


def quantize_int4(weight_NK: Tensor, group_size: int, *, quantizes_rows: bool = False) -> Any:
    """The weight as torchao's tensor: int8 of -8..7, scales and zero points [N, K / group_size].

    Raises: ValueError: K is no multiple of the group size.
    """
    dtype, groups = weight_NK.dtype, in_groups(weight_NK, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    farthest = torch.maximum(low.abs(), high.abs()) / _FARTHEST
    step = torch.maximum((high - low) / (_MOST - _LEAST), farthest)
    scale = step.clamp(min=torch.finfo(dtype).tiny).to(dtype)
    zero = (_LEAST - low / scale.float()).to(dtype)
    steps = groups / scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
    kind = GroupedIntTensor if quantizes_rows else IntxUnpackedToInt8Tensor
    return kind(
        qdata=steps.round().clamp(_LEAST, _MOST).to(torch.int8).flatten(1),
        scale=scale,
        zero_point=zero,
        target_dtype=INT4,
        block_size=(1, group_size),
        dtype=dtype,
        activation_quantization=None,
    )


@register_quantize_module_handler(Int4Config)
def _quantize(module: nn.Module, config: Int4Config) -> nn.Module:
    assert isinstance(module.weight, Tensor)
    weight = quantize_int4(module.weight, config.group_size, quantizes_rows=config.quantizes_rows)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module
