"""What the host writes into state rows: at once on the CPU, one copy a call on a modelled GPU."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from compilespec.runtime.host_writes import HostWrites
from tests.support.gpu_model import Gpu

CPU = torch.device("cpu")
WIDE = 1500  # more than what has a place in an index
SHAPES = {"table_RM": (4, 7), "bias_RV": (4, WIDE), "handle_R": (4,), "mask_RSW": (4, 3, 5)}
DTYPES = {"bias_RV": torch.float32, "handle_R": torch.int64}


def make_buffers(device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.full(shape, -1, dtype=DTYPES.get(name, torch.int32), device=device)
        for name, shape in SHAPES.items()
    }


@st.composite
def writes(draw: Any) -> tuple[str, int, list[int], int]:
    name = draw(st.sampled_from(list(SHAPES)))
    row, width = draw(st.integers(0, 3)), torch.Size(SHAPES[name][1:]).numel()
    start = draw(st.integers(0, width - 1))
    count = draw(st.sampled_from([1, 2, 1100, WIDE]))
    first = draw(st.integers(0, 99))
    return name, row, list(range(first, first + min(count, width - start))), start


@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.lists(writes(), max_size=6), max_size=5), pace=st.integers(0, 99))
def test_each_call_sees_all_that_was_written_before_it(
    calls: list[list[tuple[str, int, list[int], int]]], pace: int
) -> None:
    """Places that are written twice hold what came last; a call is a kernel that reads all."""
    buffers, want, got = make_buffers(CPU), [], []
    at_once = HostWrites(buffers, CPU)
    for call in calls:
        for name, row, values, start in call:
            at_once.write(name, row, values, start)
        at_once.send()
        want.append({name: buffer.clone() for name, buffer in buffers.items()})
    assert at_once.num_copies == 0
    gpu = Gpu(pace)
    with gpu.installed():
        there = make_buffers(gpu.device)
        host = HostWrites(there, gpu.device)
        for call in calls:
            for name, row, values, start in call:
                host.write(name, row, values, start)
            host.send()
            got.append({name: buffer.clone() for name, buffer in there.items()})
        assert host.num_copies == gpu.counts["pinned copy in"] == sum(map(bool, calls))
        assert not gpu.counts["pageable copy in"]
        got = [{name: buffer.cpu() for name, buffer in state.items()} for state in got]
    for mine, its in zip(want, got, strict=True):
        for name in SHAPES:
            assert torch.equal(mine[name], its[name]), name


def test_what_was_handed_in_may_change_afterwards() -> None:
    gpu = Gpu("when waited for")
    with gpu.installed():
        buffers = make_buffers(gpu.device)
        host, mask_SW = HostWrites(buffers, gpu.device), torch.ones(2, 5, dtype=torch.int32)
        host.write("mask_RSW", 1, mask_SW)
        mask_SW.fill_(7)
        host.send()
        assert buffers["mask_RSW"][1].tolist() == [[1] * 5, [1] * 5, [-1] * 5]


def test_a_row_is_not_left() -> None:
    with pytest.raises(AssertionError, match="table_RM: past the end of a row"):
        HostWrites(make_buffers(CPU), CPU).write("table_RM", 0, [1, 2, 3], 5)
