"""Pages of a checkpoint leave memory once its weights were packed, and nothing is lost."""

import ctypes
import mmap
import os
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compilespec.runtime.mapped_pages import MappedPages
from tests.support.memory import resident

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")


@pytest.fixture
def checkpoint(tmp_path):
    weights = {name: torch.randn(700, 1000) for name in "ab"}
    save_file(weights, tmp_path / "model.safetensors")
    with (tmp_path / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())  # the system's cache keeps what is not on the disk yet
    return weights, load_file(tmp_path / "model.safetensors")


def test_what_was_read_is_given_back_and_read_again(checkpoint):
    weights, loaded = checkpoint
    total = sum(one.sum() for one in loaded.values())
    before = resident(loaded["a"])
    assert before * 1024 >= weights["a"].nbytes
    given_back = MappedPages().give_back([loaded["a"]])
    assert weights["a"].nbytes - 3 * 4096 <= given_back <= weights["a"].nbytes
    if before == resident(loaded["a"]):
        pytest.skip("this kernel or file system keeps the pages")
    assert resident(loaded["a"]) * 1024 <= 2 * mmap.PAGESIZE, "its ends are shared with others"
    assert resident(loaded["b"]) * 1024 >= weights["b"].nbytes, "b stays"
    assert sum(one.sum() for one in loaded.values()) == total
    assert torch.equal(loaded["a"], weights["a"])


def test_changed_pages_are_kept(checkpoint):
    _, loaded = checkpoint
    loaded["a"][3] = 7.0  # the mapping is private: the file does not know
    MappedPages().give_back([loaded["a"]])
    assert (loaded["a"][3] == 7.0).all()


def test_pages_that_were_read_stay_in_the_systems_cache(checkpoint, tmp_path):
    _, loaded = checkpoint
    loaded["a"].sum()
    MappedPages().give_back([loaded["a"]])
    with (tmp_path / "model.safetensors").open("rb") as file:
        pages = mmap.mmap(
            file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE
        )
        view = np.frombuffer(pages, dtype=np.uint8)
        state = np.zeros(-(-view.nbytes // mmap.PAGESIZE), dtype=np.uint8)
        ask = ctypes.CDLL(None).mincore
        place, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes)
        assert ask(place, size, ctypes.c_void_p(state.ctypes.data)) == 0
    assert (state & 1).all(), "the next start of a program would read the file again"


def test_memory_of_its_own_is_left_alone(checkpoint):
    _, loaded = checkpoint
    own = torch.randn(700, 1000)
    mapped = MappedPages()
    assert mapped.give_back([own, torch.empty(0), torch.empty(3, device="meta")]) == 0
    assert mapped.give_back([loaded["a"].t(), loaded["a"][:1, :5]]) == 0
