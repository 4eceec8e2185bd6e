"""causal_conv and cached_conv: the definition, equal bits, a ring that rejected drafts may fill."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

from compilespec.ops import cached_conv, causal_conv
from compilespec.ops.causal_conv import cached_conv_reference
from tests.support.recurrence import NAN

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ROWS, LENGTH, KEPT = 4, 90, 6

# Tokens as (row, begin, end) of a request; a row of -1 is padding.
Span = tuple[int, int, int]
MIXED: list[list[Span]] = [
    [(0, 0, 5), (-1, 0, 2), (1, 0, 1), (2, 0, 70)],
    [(1, 1, 2), (0, 5, 9), (2, 70, 75), (-1, 0, 1)],
    [(0, 6, 10), (-1, 0, 1), (1, 2, 6), (2, 71, 90)],
    [(1, 3, 7), (0, 8, 9)],
]


class Layer:
    """Tokens of some requests, a weight, and a ring that holds NaN."""

    def __init__(self, width: int, channels: int, *, bias: bool, dtype: torch.dtype) -> None:
        self.x = torch.randn(ROWS, LENGTH, channels).to(dtype)
        self.weight = torch.randn(width, channels).to(dtype).t()  # with other strides
        self.bias = torch.randn(channels).to(dtype) if bias else None
        self.ring = torch.full((ROWS, KEPT, channels), NAN, dtype=dtype)

    def arguments(self, spans: list[Span], batch: int = 1) -> tuple[Tensor | None, ...]:
        parts = [
            self.x[row, begin:end] if row >= 0 else torch.full_like(self.x[0, begin:end], NAN)
            for row, begin, end in spans
        ]
        x = torch.cat([*parts, *parts]).unflatten(0, (2, batch, -1)).movedim(0, -1)[..., 1]
        row = [row for row, begin, end in spans for _ in range(begin, end)]
        position = [position for _, begin, end in spans for position in range(begin, end)]
        places = (torch.tensor(one, dtype=torch.int32).view(batch, -1) for one in (row, position))
        return (x, self.weight, self.bias, self.ring, *places)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "channels", "bias"),
    [(4, 48, True), (1, 7, False), (2, 300, False), (3, 1, True), (4, 517, False), (6, 33, True)],
)
def test_cached_conv_equals_reference(width, channels, bias, dtype):
    """Bit for bit; poison in the ring and in padded tokens shows nowhere."""
    layer = Layer(width, channels, bias=bias, dtype=dtype)
    other = torch.full_like(layer.ring, NAN)
    for spans in MIXED:
        call = layer.arguments(spans)
        got, want = cached_conv(*call), cached_conv_reference(*call[:3], other, *call[4:])
        assert got.is_contiguous()
        assert not want.isnan().any()
        assert torch.equal(got, want)
        assert not got[call[4] < 0].any()
        torch.testing.assert_close(layer.ring, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 4], ids="W{}".format)
def test_bits_do_not_depend_on_how_tokens_come(width, dtype, kernels, threads):
    """A prompt at once, one by one, by steps whose drafts are rejected, on several threads."""
    layer = Layer(width, 300, bias=True, dtype=dtype)
    threads(1)
    want = causal_conv(layer.x, layer.weight, layer.bias)
    assert torch.equal(cached_conv(*layer.arguments([(1, 0, LENGTH)]))[0], want[1])
    for num_threads, ends in ((1, range(1, LENGTH + 1)), (2, (64, 65, LENGTH))):
        threads(num_threads)
        layer.ring.fill_(NAN)
        for begin, end in zip((0, *ends[:-1]), ends, strict=True):
            got = cached_conv(*layer.arguments([(0, 0, 2), (1, begin, end), (-1, 0, 1)]))
            assert torch.equal(got[0, 2:-1], want[1, begin:end])
    layer.ring.fill_(NAN)
    start, tokens = 0, layer.x[1].clone()
    for accepted in (3, 0, 1, 2, 0, 0, 3):
        layer.x[1, start + 1 + accepted : start + 4] = 7.0  # drafts that are rejected
        got = cached_conv(*layer.arguments([(1, start, start + 4)]))[0]
        assert torch.equal(got[: accepted + 1], want[1, start : start + 1 + accepted])
        layer.x[1] = tokens
        start += 1 + accepted


def test_equals_transformers():
    layer = Layer(4, 12, bias=True, dtype=torch.float64)
    got = causal_conv(layer.x, layer.weight, layer.bias)
    want = causal_conv1d_fn(layer.x.transpose(1, 2), layer.weight, layer.bias, None)
    torch.testing.assert_close(got, want.transpose(1, 2))
    call = layer.arguments([(row, 0, LENGTH) for row in range(ROWS)], batch=ROWS)
    torch.testing.assert_close(cached_conv(*call), got)


def test_errors_name_what_does_not_fit(kernels):
    layer = Layer(4, 5, bias=True, dtype=torch.float32)
    call = layer.arguments([(0, 0, 3)])
    for place, wrong, message in (
        (1, layer.weight[:4], "do not fit"),
        (2, layer.weight[:, 0][:4], "expected bias"),
        (3, layer.ring[:, :2].contiguous(), "a ring of 2 tokens for a convolution over 4"),
        (3, layer.ring.double(), "expected contiguous recent tokens"),
        (4, call[4] + 9, "row 9 in a state of 4 rows"),
        (5, call[5].long(), "position must be int32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cached_conv(*call[:place], wrong, *call[place + 1 :])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_opcheck(bias):
    layer = Layer(3, 8, bias=bias, dtype=torch.float32)
    layer.ring.zero_()  # NaN is equal to nothing
    call = layer.arguments([(0, 0, 2), (-1, 0, 1), (2, 0, 3)], batch=2)
    torch.library.opcheck(torch.ops.compilespec.cached_conv.default, call)
    torch.library.opcheck(torch.ops.compilespec.causal_conv.default, (layer.x, *call[1:3]))
    assert cached_conv(call[0][:0], *call[1:4], call[4][:0], call[5][:0]).shape == (0, 3, 8)
