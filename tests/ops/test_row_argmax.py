"""row_argmax on the CPU: the index that torch gives, for any row."""

from __future__ import annotations

import math

import pytest
import torch

OPS = torch.ops.compilespec
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COLUMNS = [1, 7, 64, 127, 2048, 2049, 5000, 49152]  # spans are 2048


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_it_is_the_first_of_the_largest(kernels, columns, dtype):
    """Few values, so that ties are in a span and between spans; infinities; NaN; strided rows."""
    x = torch.randint(-2, 3, (6, 5, columns + 2)).to(dtype)[..., 1:-1]
    x[1] = torch.randn(5, columns).to(dtype)
    x[2, 0], x[2, 1], x[2, 2] = -math.inf, math.inf, torch.finfo(dtype).min
    x[2, 3, columns // 2 :] = math.inf
    x[3, :, -1] = 9
    x[4, 0], x[4, 1, columns // 2], x[4, 2, -1], x[4, 3, ::3] = (math.nan,) * 4
    x[5] = -0.0
    x[5, :, columns // 3 :: 2] = 0.0
    got = OPS.row_argmax(x)
    assert got.dtype == torch.int64
    assert torch.equal(got, x.argmax(-1))
    assert torch.equal(OPS.row_argmax(x[0, 0]), x[0, 0].argmax(-1))


def test_no_rows(kernels):
    assert OPS.row_argmax(torch.empty(0, 3, 9)).shape == (0, 3)
    with pytest.raises(RuntimeError, match="no element"):
        OPS.row_argmax(torch.empty(1, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(kernels, dtype):
    for shape in ((9,), (2, 3, 70), (0, 5)):
        torch.library.opcheck(OPS.row_argmax.default, (torch.randn(shape).to(dtype),))
