"""paged_attention of the rows of a block: a part of the cache, and each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compilespec.ops.paged_attention import paged_attention, paged_attention_reference
from tests.support.attention import Case
from tests.support.block_rows import BlockRows

CASES = [
    Case(),
    Case(batch=1, context=1),
    Case(context=61, group=5, num_kv_heads=1, block_size=3),
    Case(context=64, head_dim=20, value_dim=33, window=2),  # a window is not applied
    Case(batch=1, context=700, num_kv_heads=1, head_dim=48, value_dim=48),
    Case(latent=True, num_kv_heads=1, group=7, head_dim=40, value_dim=29, context=254),
]


TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_sees_its_part_of_the_cache_and_its_rows(case, dtype, kernels):
    rows, near = BlockRows(dataclasses.replace(case, dtype=dtype)), TOLERANCE[dtype]
    arguments = rows.arguments()
    got = paged_attention(*arguments)
    torch.testing.assert_close(got.double(), rows.wanted(), rtol=near, atol=near)
    torch.testing.assert_close(
        paged_attention_reference(*rows.arguments()), got, rtol=near, atol=near
    )
    for cache, untouched in zip(arguments[3:5], rows.arguments()[3:5], strict=True):
        assert cache is None or torch.equal(cache.nan_to_num(7.0), untouched.nan_to_num(7.0))


def test_a_block_after_all_others_sees_no_more_than_the_table_holds(kernels):
    """Its rows stand past the last position that a request may have."""
    rows = BlockRows(Case(batch=2, context=59, block_size=16, dtype=torch.float64))
    arguments = rows.arguments()
    arguments[8] = arguments[8][:, :4].contiguous()  # blocks for 64 positions, and no others
    got = paged_attention(*arguments)
    torch.testing.assert_close(got, rows.wanted(), rtol=1e-12, atol=1e-12)


def test_rows_without_a_path_or_of_another_shape_are_refused(kernels):
    arguments = BlockRows(Case()).arguments()
    for wrong in ((None, arguments[15]), (arguments[14], arguments[15][:, 1:])):
        with pytest.raises(RuntimeError, match="paged_attention: first"):
            paged_attention(*arguments[:14], *wrong)


def test_opcheck():
    arguments = BlockRows(Case(batch=2, context=5)).arguments()
    for cache in arguments[3:5]:
        cache.nan_to_num_()
    torch.library.opcheck(torch.ops.compilespec.paged_attention.default, arguments)
