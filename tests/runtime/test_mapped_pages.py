"""Pages of a checkpoint leave memory once its weights were packed, and nothing is lost."""

import mmap
import sys

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


def test_memory_of_its_own_is_left_alone(checkpoint):
    _, loaded = checkpoint
    own = torch.randn(700, 1000)
    mapped = MappedPages()
    assert mapped.give_back([own, torch.empty(0), torch.empty(3, device="meta")]) == 0
    assert mapped.give_back([loaded["a"].t(), loaded["a"][:1, :5]]) == 0
