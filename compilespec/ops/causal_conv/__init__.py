"""Short causal convolutions: the marker that tracing emits, and the operator that replaces it."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.causal_conv.reference import cached_conv_reference, causal_conv_reference

__all__ = ["cached_conv", "cached_conv_reference", "causal_conv", "causal_conv_reference"]


def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


causal_conv = define_op(
    causal_conv_reference,
    _fake,
    has_kernel=False,
)

cached_conv = define_op(
    cached_conv_reference,
    _fake,
    writes=("recent_RPC",),
    has_kernel=True,
    triton="causal_conv",
)
