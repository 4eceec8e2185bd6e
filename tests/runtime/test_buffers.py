"""Persistent buffers: what they hold, and that zeros take no memory before they are written."""

import dataclasses
import mmap
import sys

import pytest
import torch

from compilespec.passes.splice.insert_paged_attention import HEADS_FIRST
from compilespec.program import BufferSpec
from compilespec.runtime.buffers import MAPPED, allocate
from tests.support.memory import resident

CPU = torch.device("cpu")


def spec(shape, dtype, fill=0):
    return BufferSpec(name="k", kind="cache", shape=shape, dtype=dtype, fill=fill)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("rows", [3, MAPPED // 7 + 1])
def test_zeros_of_any_size(dtype, rows):
    buffer = allocate(spec((rows, 7), dtype), CPU)
    assert (buffer.dtype, buffer.shape, buffer.stride()) == (dtype, (rows, 7), (7, 1))
    assert not buffer.any()
    buffer[rows - 1] = 1
    assert buffer.sum() == 7, "it can be written"


@pytest.mark.parametrize(("blocks", "fill"), [(3, 0), (MAPPED, 0), (3, 7)])
def test_a_cache_lies_head_by_head(blocks, fill):
    in_order = dataclasses.replace(spec((blocks, 4, 3, 2), torch.int8, fill), order=HEADS_FIRST)
    for buffer in (allocate(in_order, CPU), in_order.empty(CPU).fill_(fill)):
        assert (buffer.shape, buffer.stride()) == ((blocks, 4, 3, 2), (8, 2, blocks * 8, 1))
        assert (buffer == fill).all()
        buffer.view(-1, 3, 2)[4:8, 1] = 1
        assert buffer[1, :, 1].sum() == 8, "a block's cells of one head"
        assert (buffer == fill).sum() == buffer.numel() - 8


def test_other_values_are_written_at_once():
    assert (allocate(spec((MAPPED,), torch.int32, fill=-1), CPU) == -1).all()


def test_two_buffers_do_not_share_memory():
    first, second = (allocate(spec((MAPPED,), torch.float32), CPU) for _ in range(2))
    first[:] = 1
    assert not second.any()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_cache_is_resident_as_far_as_it_was_written():
    full = [allocate(spec((64, 2**20), torch.uint8), CPU).fill_(1) for _ in range(3)]
    cache = allocate(spec((64, 2**20), torch.uint8), CPU)  # Linux may join it to a full one
    cache[5] = 1
    assert resident(cache) == 1024, "KiB: one row of 64, with any huge pages"
    spec_of_heads = dataclasses.replace(spec((1024, 16, 8, 64), torch.uint8), order=HEADS_FIRST)
    by_head = allocate(spec_of_heads, CPU)
    by_head[3] = 1
    assert resident(by_head) == 8 * mmap.PAGESIZE // 1024, "a page for a head's part of a block"
    assert [resident(one) for one in full] == [64 * 1024] * 3
