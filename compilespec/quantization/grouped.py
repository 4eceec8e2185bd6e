"""Weights in groups whose products quantize the rows, too: torchao's tensor with our product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.quantization import IntxUnpackedToInt8Tensor

from compilespec.ops.grouped_linear import grouped_linear

INT4 = getattr(torch, "int4")  # noqa: B009  (unknown to type checkers)


class GroupedIntTensor(IntxUnpackedToInt8Tensor):
    """A weight of up to 8 bits in groups; its products are `compilespec::grouped_linear`.

    Scales and zero points may be of another dtype than `dtype`, that of the products.
    """

    quantizes_rows = True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The weight on another device.  Its own dtype stays that of its products."""
        asked = self._get_to_kwargs(*args, **kwargs)
        parts = [part.to(asked["device"]) for part in (self.qdata, self.scale, self.zero_point)]
        sizes = (self.target_dtype, self.block_size, asked["dtype"], self.activation_quantization)
        return type(self)(*parts, *sizes)


def _linear(
    function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    bits = 4 if weight.target_dtype == INT4 else 8
    return grouped_linear(x, weight.qdata, weight.scale, bias, bits, weight.zero_point)


GroupedIntTensor.implements([torch.ops.aten.linear.default])(_linear)
GroupedIntTensor.implements_torch_function([F.linear])(_linear)
