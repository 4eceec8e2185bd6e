"""The pool: the bits of OpenMP's threads, for any number of threads and any caller."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compilespec.ops import load_kernels, pack_weight, packed_linear
from compilespec.ops.thread_pool import use_thread_pool

pytestmark = pytest.mark.skipif(not load_kernels(), reason="the C++ kernels are not there")

COLUMNS, DEPTH = 1000, 300  # enough work for several threads


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    use_thread_pool(False)
    torch.set_num_threads(count)


def product(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(COLUMNS, DEPTH, generator=generator)
    return torch.randn(rows, DEPTH, generator=generator), pack_weight(weight)


def run(x: Tensor, weight: Tensor) -> Tensor:
    return packed_linear(x, weight, None, COLUMNS)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 5, 65])
def test_bits_are_those_of_openmp(num_threads: int, rows: int) -> None:
    x, weight = product(rows)
    wanted = run(x, weight)
    torch.set_num_threads(num_threads)
    use_thread_pool(True)
    assert all(torch.equal(run(x, weight), wanted) for _ in range(50))


def test_threads_that_fell_asleep_or_are_too_many_do_no_harm() -> None:
    x, weight = product(1)
    wanted = run(x, weight)
    use_thread_pool(True)
    for num_threads in (5, 2, 4) * 20:
        torch.set_num_threads(num_threads)
        assert torch.equal(run(x, weight), wanted)
        threading.Event().wait(0.001)  # longer than they stay awake


@pytest.mark.parametrize("num_threads", [2, 5])
def test_waiting_threads_may_fetch_weights_that_are_gone(num_threads: int) -> None:
    large = 8 << 20  # numbers: malloc gives such memory back to the system when it is freed
    torch.set_num_threads(num_threads)
    use_thread_pool(True)
    for _ in range(3):
        x, weight = product(1)
        wanted = run(x, weight)
        gone = pack_weight(torch.ones(large // DEPTH, DEPTH))
        for _ in range(3):  # learns that `gone` comes after `weight`
            assert torch.equal(run(x, weight), wanted)
            packed_linear(x, gone, None, large // DEPTH)
        del gone
        assert torch.equal(run(x, weight), wanted)
        threading.Event().wait(0.001)  # they fetch
        assert torch.equal(run(x, weight), wanted)


def test_callers_at_the_same_time_each_get_their_own() -> None:
    torch.set_num_threads(2)
    given = [product(3, seed) for seed in range(4)]
    wanted = [run(*one) for one in given]
    use_thread_pool(True)
    wrong: list[int] = []

    def call(one: int) -> None:
        wrong.extend(i for i in range(200) if not torch.equal(run(*given[one]), wanted[one]))

    callers = [threading.Thread(target=call, args=(one,)) for one in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


FORKED = """
import os, torch
from compilespec.ops import pack_weight, packed_linear
from compilespec.ops.thread_pool import use_thread_pool

torch.set_num_threads(2)
use_thread_pool(True)
x, weight = torch.ones(1, 300), pack_weight(torch.ones(1000, 300))
wanted = packed_linear(x, weight, None, 1000)
torch.ones(1 << 20)  # on threads of OpenMP, for whose end a fork would wait
child = os.fork()
if child == 0:
    use_thread_pool(False)
    use_thread_pool(True)
is_right = torch.equal(packed_linear(x, weight, None, 1000), wanted)
if child == 0:
    os._exit(0 if is_right else 1)
assert is_right and os.waitpid(child, 0)[1] == 0
print("both")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_a_pool_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "both\n", done.stderr


THREADS = """
import os, time, torch
from compilespec.ops import pack_weight, packed_linear
from compilespec.ops.thread_pool import use_thread_pool

def threads():
    return set(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
alone = threads()
x, weight = torch.ones(1, 300), pack_weight(torch.ones(1000, 300))
packed_linear(x, weight, None, 1000)
openmp = threads() - alone
use_thread_pool(True)
deadline = time.monotonic() + 10 * (os.environ["OMP_PROC_BIND"] == "false")
while openmp & threads() and time.monotonic() < deadline:
    time.sleep(0.001)
before = threads()
packed_linear(x, weight, None, 1000)
print(len(openmp), len(openmp & before), len(threads() - before))
use_thread_pool(False)
assert packed_linear(x, weight, None, 1000).eq(300).all() and torch.get_num_threads() == 2
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize(("pinned", "wanted"), [("false", "1 0 1"), ("true", "1 1 0")])
def test_openmp_threads_end_unless_they_are_pinned_and_used(pinned: str, wanted: str) -> None:
    """OpenMP's would spin on the pool's cores; pinned, the pool's would lie on their caller's."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_PROC_BIND": pinned, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == (wanted, 0), done.stderr
