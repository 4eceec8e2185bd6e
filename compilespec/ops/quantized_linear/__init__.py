"""Linear layers over quantised weights: few rows, rows independent of each other.

On the CPU (`kernel.cpp`) the stored weights are widened as they are read and summed in float32 in
one order (weight-only), or multiplied in integers with rows that are quantised on the way (dynamic
int8), so that the bits of a row do not depend on the other rows, the batch or the threads.
`kernel.py` is the weight-only product on CUDA, of stored weights and of four bits packed by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.grouped_linear import fake, packed_fake
from compilespec.ops.grouped_linear.reference import pack_groups, pack_quad_bytes, pack_quad_nibbles
from compilespec.ops.packed_linear import pack_weight
from compilespec.ops.quantized_linear import reference
from compilespec.ops.quantized_linear.integer_product import dynamic_int8_product
from compilespec.ops.quantized_linear.reference import (
    pack_bytes,
    pack_int4,
    pack_nibbles,
    pack_quads,
    pack_scale,
)

__all__ = ["LAYOUTS", "dynamic_int8_linear", "dynamic_int8_product", "quantized_linear"]

# The layouts that `InputSpec.packed` may name.
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "panels": pack_weight,
    "bytes": pack_bytes,
    "int4": pack_int4,
    "nibbles": pack_nibbles,
    "quads": pack_quads,
    "scale": pack_scale,
    "quad_bytes": pack_quad_bytes,
    "quad_nibbles": pack_quad_nibbles,
    "groups": pack_groups,
}


_TAGS = (torch.Tag.flexible_layout,)
quantized_linear = define_op(
    reference.quantized_linear_reference,
    fake,
    has_kernel=False,
    triton="quantized_linear",
    tags=_TAGS,
)
define_op(
    reference.int4_linear_reference,
    fake,
    has_kernel=False,
    triton="quantized_linear",
    tags=_TAGS,
)
dynamic_int8_linear = define_op(
    reference.dynamic_int8_linear_reference,
    fake,
    has_kernel=False,
    tags=_TAGS,
)
define_op(
    reference.packed_quantized_linear_reference,
    packed_fake,
    has_kernel=True,
    tags=_TAGS,
)
define_op(
    reference.packed_dynamic_int8_linear_reference,
    packed_fake,
    has_kernel=True,
    tags=_TAGS,
)
