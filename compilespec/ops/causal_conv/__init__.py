"""Short causal convolutions: the marker that tracing emits, and the operator that replaces it."""

from __future__ import annotations

from torch import Tensor

from compilespec.ops._library import define_op
from compilespec.ops.causal_conv.reference import cached_conv_reference, causal_conv_reference

__all__ = ["cached_conv", "cached_conv_reference", "causal_conv", "causal_conv_reference"]


def causal_conv(x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """Convolve each sequence over its tokens; see `causal_conv_reference`."""
    return _CAUSAL_CONV(x_BTC, weight_CW, bias_C)


def cached_conv(
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    recent_RPC: Tensor,
    row_BS: Tensor,
    position_BS: Tensor,
) -> Tensor:
    """Go on from each request's recent tokens, in place; see `cached_conv_reference`."""
    return _CACHED_CONV(x_BSC, weight_CW, bias_C, recent_RPC, row_BS, position_BS)


def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


_CAUSAL_CONV = define_op(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    causal_conv_reference,
    _fake,
    has_kernel=False,
)

_CACHED_CONV = define_op(
    "cached_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) recent, Tensor row, "
    "Tensor position) -> Tensor",
    cached_conv_reference,
    _fake,
    has_kernel=True,
    triton="causal_conv",
)
