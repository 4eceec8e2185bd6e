"""Equality of two tensors: bit for bit, or within one bound per dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compilespec.passes.context import PassContext
from compilespec.tracing.quantized_weights import quantizes_rows

# Largest difference that rounding alone may make over a whole step, as a part of the tensor's
# largest magnitude: about 10^4 units of roundoff in float64, 10^3 in float32, 16 in the 16-bit
# types, 20 to 1000 times what the families of the tests show.  A fault is of order 1.
BOUNDS = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
}
# Where activations are quantized on the way, a difference in the last place may round to the next
# of 8 bits: inputs moved by 1e-7 in float32 moved the logits of a three-layer model by up to
# 4%, 1e4 times what they do unquantized.
QUANTIZED_ROWS_BOUND = 0.1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of `got` from `want`."""

    error: float  # largest, as a part of the largest wanted magnitude; inf where not comparable
    text: str


def rounding_bound(ctx: PassContext) -> float:
    """The largest difference that rounding alone can make in a step of this program."""
    traced = (ctx.target, *ctx.draft.values())
    quantizes = any(quantizes_rows(w) for call in traced for w in call.weights.values())
    bound = BOUNDS[ctx.config.dtype]
    return max(bound, QUANTIZED_ROWS_BOUND) if quantizes else bound


def compare(got: Tensor, want: Tensor, *, bound: float | None) -> Difference | None:
    """The difference; None where they are equal: bit for bit without a bound; integers always.  NaN
    equals NaN: poison must stay in its place and appear nowhere else.

    NaN equals NaN: poison must stay where it is, and come from nowhere.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        text = f"expected {_form(want)}, got {_form(got)}"
        return Difference(error=float("inf"), text=text)
    if not want.is_floating_point():
        different = got != want
    else:
        same_nan = got.isnan() & want.isnan()
        if bound is None:
            bits = _BITS[want.itemsize]
            different = (got.contiguous().view(bits) != want.contiguous().view(bits)) & ~same_nan
        else:
            limit = bound * _scale(want)
            near = (got.double() - want.double()).abs() <= limit
            different = ~(near | same_nan | (got == want))
    if not bool(different.any()):
        return None
    return _describe(got, want, different)


def error_of(got: Tensor, want: Tensor) -> float:
    """The largest difference as a part of the largest wanted magnitude; 0 for integers."""
    if not want.is_floating_point() or got.shape != want.shape or want.numel() == 0:
        return 0.0
    return float((got.double() - want.double()).nan_to_num().abs().max()) / _scale(want)


def _describe(got: Tensor, want: Tensor, different: Tensor) -> Difference:
    where = different.nonzero()
    first = tuple(where[0].tolist())
    text = f"{len(where)} of {want.numel()} differ"
    if want.dim():
        text += f", first at {list(first)}"
    text += f": expected {want[first].item():.6g}, got {got[first].item():.6g}"
    error = (got.double() - want.double()).abs()[different].max()
    size = float(error.nan_to_num(nan=float("inf"))) / _scale(want)
    return Difference(error=size, text=text)


def _scale(want: Tensor) -> float:
    finite = want[want.isfinite()] if want.is_floating_point() else want
    return float(finite.double().abs().max()) or 1.0 if finite.numel() else 1.0


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
