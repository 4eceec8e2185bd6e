"""head_linear: the definition, weights read where they lie, rows of the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilespec.ops.head_linear import head_linear, head_linear_reference

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SIZES = [(1, 1, 1), (3, 20, 7), (5, 33, 70), (2, 130, 67), (4, 64, 128)]  # heads, depth, columns


def weight_of(heads: int, depth: int, columns: int, *, turned: bool, dtype: torch.dtype) -> Tensor:
    """Some rows of each head of a projection, as they lie; `turned`: their transposes."""
    inner, outer = (columns, depth) if turned else (depth, columns)
    whole = torch.randn(heads * (inner + 3), outer) / outer**0.5
    part = whole.to(dtype).view(heads, inner + 3, outer)[:, 2 : 2 + inner]
    return part.transpose(1, 2) if turned else part


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_equals_its_reference_and_rows_are_bitwise_independent(
    sizes, dtype, turned, kernels, threads
):
    torch.manual_seed(0)
    heads, depth, columns = sizes
    weight = weight_of(*sizes, turned=turned, dtype=dtype)
    x = torch.randn(2, heads, 27, depth + 5).to(dtype)[..., 3:-2].transpose(1, 2)
    threads(1)
    got = head_linear(x, weight)
    assert got.is_contiguous()
    assert got.dtype == dtype
    assert got.shape == (2, 27, heads, columns)
    want = head_linear_reference(x, weight)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for num_threads in (1, 3):
        threads(num_threads)
        assert torch.equal(head_linear(x.contiguous(), weight), got)
        for rows in (slice(0, 1), slice(5, 9), slice(24, 27)):
            assert torch.equal(head_linear(x[:, rows], weight), got[:, rows])
        assert torch.equal(head_linear(x[1, 13], weight), got[1, 13])


def test_other_strides_and_nothing_at_all():
    x, weight = torch.randn(3, 4, 6).double(), torch.randn(4, 12, 5).double()[:, ::2]
    wide = torch.randn(4, 6, 10).double()[..., ::2]
    for one in (weight, wide):
        torch.testing.assert_close(head_linear(x, one), head_linear_reference(x, one))
    assert head_linear(x[:0], weight).shape == (0, 4, 5)
    assert not head_linear(x[..., :0], weight[:, :0]).any()


def test_wrong_shapes_are_refused(kernels):
    x, weight = torch.randn(3, 4, 6), torch.randn(4, 6, 5)
    for wrong in (weight[:3], weight[:, :5], weight.double(), weight[0]):
        with pytest.raises(RuntimeError, match="head_linear"):
            head_linear(x, wrong)


@pytest.mark.parametrize("batch", [0, 1, 3], ids="B{}".format)
def test_opcheck(batch):
    weight = torch.randn(4, 6, 5)
    torch.library.opcheck(
        torch.ops.compilespec.head_linear.default, (torch.randn(batch, 2, 4, 6), weight)
    )
