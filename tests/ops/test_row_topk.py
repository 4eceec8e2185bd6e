"""row_topk on the CPU: the values that torch gives, at places that hold them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compilespec.ops.row_topk import row_topk_reference

OPS = torch.ops.compilespec
DTYPES = [torch.float32, torch.float64]
COLUMNS = [(1, 1), (7, 7), (64, 3), (65, 65), (127, 10), (5000, 3), (8192, 10), (49152, 1)]


def check(x: Tensor, k: int) -> None:
    """Values as torch's; each place once, the first ones of equal values."""
    values, places = OPS.row_topk(x, k, False)
    wanted = row_topk_reference(x, k, False)[0]
    assert places.dtype == torch.int64
    assert torch.equal(values.nan_to_num(nan=9e9), wanted.nan_to_num(nan=9e9))
    assert torch.equal(x.gather(-1, places).nan_to_num(nan=9e9), values.nan_to_num(nan=9e9))
    order = x.sort(dim=-1, descending=True, stable=True)[1][..., :k]
    if not x.isnan().any():
        assert torch.equal(places, order)
    assert all(len(set(row)) == k for row in places.reshape(-1, k).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "k"), COLUMNS)
def test_the_largest_are_found_in_order(kernels, columns, k, dtype):
    """Ties in a span and between spans; infinities; NaN; strided rows."""
    x = torch.randint(-2, 3, (6, 5, columns + 2)).to(dtype)[..., 1:-1]
    x[1] = torch.randn(5, columns).to(dtype)
    x[2, 0], x[2, 1], x[2, 2] = -math.inf, math.inf, torch.finfo(dtype).min
    x[2, 3, columns // 2 :] = math.inf
    x[2, 4, : columns // 2] = -math.inf
    x[3, :, -1] = 9
    check(x, k)
    check(x[0, 0], k)
    x[4, 0], x[4, 1, columns // 2], x[4, 2, -1], x[4, 3, ::3] = (math.nan,) * 4
    check(x, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "k"), COLUMNS)
def test_log_probabilities(kernels, columns, k, dtype):
    """As torch's up to rounding; NaN where torch has no number; the same bits in any company."""
    x = torch.randn(4, 5, columns).to(dtype) * 3
    x[1, 0, ::2] = -math.inf
    x[2, 0], x[2, 1, 0], x[2, 2, -1] = -math.inf, math.inf, math.nan
    x[3] += 1000
    values, places = OPS.row_topk(x, k, True)
    wanted = row_topk_reference(x, k, True)[0]
    torch.testing.assert_close(values, wanted, equal_nan=True)
    assert torch.equal(places, OPS.row_topk(x, k, False)[1])
    for row, value in zip(x.flatten(0, 1), values.flatten(0, 1), strict=True):
        alone = OPS.row_topk(row, k, True)[0]
        assert torch.equal(alone.nan_to_num(nan=9e9), value.nan_to_num(nan=9e9))


def test_what_it_refuses_and_what_is_empty(kernels):
    assert OPS.row_topk(torch.empty(0, 3, 9), 2, True)[1].shape == (0, 3, 2)
    assert OPS.row_topk(torch.empty(3, 9), 0, True)[0].shape == (3, 0)
    with pytest.raises(RuntimeError, match="of 4 columns or more"):
        OPS.row_topk(torch.empty(2, 3), 4, False)
    with pytest.raises(RuntimeError, match="unsupported type"):
        OPS.row_topk(torch.empty(2, 3, dtype=torch.float16), 1, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(kernels, dtype):
    for shape in ((9,), (2, 3, 70), (0, 5)):
        for log_probs in (False, True):
            torch.library.opcheck(
                OPS.row_topk.default, (torch.randn(shape).to(dtype), 3, log_probs)
            )
