"""The collectives of a step, between threads: rank order, bits, ties, padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilespec.errors import NotSupported
from compilespec.ops.collectives import acting, current
from compilespec.ops.collectives.group import ThreadGroup
from compilespec.ops.quantized_linear.reference import dynamic_int8_linear_reference
from tests.support.rank_threads import by_ranks

OPS = torch.ops.compilespec


@pytest.mark.parametrize("size", [2, 3, 5], ids="{} ranks".format)
def test_a_row_of_a_sum_has_the_same_bits_alone_and_among_others(size):
    torch.manual_seed(0)
    parts = torch.randn(size, 7, 19, dtype=torch.float32)
    whole = by_ranks(size, lambda rank: OPS.all_reduce(parts[rank], size))
    assert all(torch.equal(one, whole[0]) for one in whole)
    for row in range(7):
        alone = by_ranks(size, lambda rank, row=row: OPS.all_reduce(parts[rank, row], size))
        assert torch.equal(alone[0], whole[0][row])


def test_gathered_parts_stand_in_rank_order_without_their_padding():
    whole = torch.arange(2 * 7.0).view(2, 7)
    padded = torch.nn.functional.pad(whole, (0, 2))
    found = by_ranks(3, lambda rank: OPS.all_gather(padded[:, 3 * rank : 3 * rank + 3], 1, 7, 3))
    assert all(torch.equal(one, whole) for one in found)


@pytest.mark.parametrize("size", [2, 3, 7, 8], ids="{} ranks".format)
def test_an_argmax_over_ranks_is_the_argmax(size):
    """Ties go to the first id, NaN is largest, padding never wins; a rank may have padding only."""
    length = 13
    rows = torch.tensor(
        [
            [0.0] * length,
            [-5.0] * (length - 1) + [-4.0],
            [1.0, 3.0, 3.0] + [0.0] * 7 + [3.0] * 3,
            [float("-inf")] * length,
            [0.0] * 6 + [float("nan")] + [9.0] * 6,
        ]
    )
    num_rows = -(-length // size)
    padded = torch.nn.functional.pad(rows, (0, num_rows * size - length))

    def own(rank: int) -> tuple[Tensor, Tensor]:
        piece = padded[:, rank * num_rows : (rank + 1) * num_rows]
        return OPS.argmax_shard(piece, length, size)

    best = rows.gather(-1, rows.argmax(-1, keepdim=True)).squeeze(-1)
    for ids, values in by_ranks(size, own):
        assert ids.tolist() == rows.argmax(-1).tolist()
        torch.testing.assert_close(values, best, rtol=0, atol=0, equal_nan=True)


def test_rows_of_a_table_that_is_cut_add_up_to_the_rows():
    table, ids = torch.randn(6, 5, dtype=torch.float64), torch.tensor([[0, 5, 3], [2, 2, 4]])

    def looked_up(rank: int) -> Tensor:
        return OPS.all_reduce(OPS.embed_shard(ids, table[2 * rank : 2 * rank + 2], 3), 3)

    assert all(torch.equal(one, table[ids]) for one in by_ranks(3, looked_up))


def test_pieces_of_what_all_have_are_shared_by_several_ranks():
    whole = torch.arange(12.0).view(3, 4)
    found = by_ranks(4, lambda rank: OPS.take_shard(whole, 1, 2, 4).tolist())
    assert found[0] == found[1] == whole[:, :2].tolist()
    assert found[2] == found[3] == whole[:, 2:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_in_integers_by_rows_has_the_bits_of_the_whole(dtype):
    torch.manual_seed(0)
    x, bias = torch.randn(2, 3, 12).to(dtype), torch.randn(5).to(dtype)
    weight, scale = torch.randint(-128, 128, (5, 12), dtype=torch.int8), torch.rand(5, 1)
    want = dynamic_int8_linear_reference(x, weight, scale, bias)

    def own(rank: int) -> Tensor:
        part = slice(4 * rank, 4 * rank + 4)
        return OPS.dynamic_int8_shard(x[..., part], weight[:, part], scale, bias, 3)

    assert all(torch.equal(one, want) for one in by_ranks(3, own))


def test_without_a_job_a_step_for_several_ranks_is_refused():
    with pytest.raises(NotSupported, match="torchrun --nproc-per-node 2"):
        current(2)


def test_operators_keep_their_promises_to_the_compiler():
    x = torch.randn(3, 4)
    group = ThreadGroup.make(1)[0]
    with acting(group):
        for op, args in (
            (OPS.all_reduce, (x, 1)),
            (OPS.all_gather, (x, 1, 3, 1)),
            (OPS.argmax_shard, (x, 4, 1)),
            (OPS.embed_shard, (torch.tensor([1, 2]), x, 1)),
            (OPS.take_shard, (x, 0, 1, 1)),
            (
                OPS.dynamic_int8_shard,
                (x, torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1), None, 1),
            ),
        ):
            torch.library.opcheck(op.default, args)
