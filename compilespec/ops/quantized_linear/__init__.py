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
from compilespec.ops.gguf_blocks import TYPES, by_rows, pack_gguf_blocks, read_blocks
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

__all__ = [
    "LAYOUTS",
    "dynamic_int8_linear",
    "dynamic_int8_product",
    "lay_out",
    "look_of_part",
    "quantized_linear",
]

# The layouts that `InputSpec.packed` may name; "a/b" is b of a (see `lay_out`).
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


def lay_out(packed: str, weight: Tensor) -> Tensor:
    """A weight in the layout that `InputSpec.packed` names.

    "Q4_K.values" is a part of the blocks of a GGUF type, and "Q4_K.values/quad_nibbles" is that
    part in one of `LAYOUTS`.
    """
    if "." not in packed:
        return LAYOUTS[packed](weight)
    blocks, _, layout = packed.partition("/")
    kind, part = blocks.split(".")
    if layout:
        assert LAYOUTS[layout] is TYPES[kind].layout(part)
        return pack_gguf_blocks(weight.contiguous(), kind, part)
    depth = TYPES[kind].depth(weight.shape[1])
    return by_rows(lambda some: getattr(read_blocks(kind, some), part), weight, depth)


def look_of_part(packed: str, blocks: Tensor) -> Tensor:
    """What `lay_out` gives for a part of GGUF blocks, without memory: its shape and dtype."""
    kind, part = packed.split(".")
    return TYPES[kind].part(part, blocks)


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
