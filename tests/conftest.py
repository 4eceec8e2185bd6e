"""What every test shares: caches kept between runs, fixed seeds, skips that say why."""

from __future__ import annotations

import bisect
import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE_DIR = ROOT / ".cache" / "tests"

# Read when torch, Inductor and compilespec are imported or first compile: set before any of them.
# The caches outlive a run, so that a second one compiles nothing anew; `make clean` empties them.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE_DIR / "inductor"))
os.environ.setdefault("COMPILESPEC_CACHE_DIR", str(CACHE_DIR / "compilespec"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait are up to 40 times slower where tests share their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may ask for anything from outside
os.environ.setdefault("FAKE_CUDA_DEVICES", "2")  # of tools/fake_cuda, where it is installed

import hypothesis
import numpy as np
import pytest
import torch

from tools.fake_cuda import device as fake_device

if not torch.cuda.is_available():  # Triton reads it when a kernel is decorated
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: one thread each
    torch.set_num_threads(1)

# Tracing makes objects by the million; looking through all of them less often is a tenth off it.
gc.set_threshold(50_000, 20, 100)

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """Let Inductor compile with -O1: toy models run for milliseconds and are compiled for minutes.

    Results keep their bits: Inductor's flags allow no contraction and no unsafe arithmetic.
    """
    from torch._inductor import cpp_builder

    flags = cpp_builder._get_optimization_cflags
    cpp_builder._get_optimization_cflags = lambda compiler, *_: flags(compiler, True)
    if fake_device.is_here():
        from tools.fake_cuda import interpreter

        fake_device.attach_project()
        interpreter.attach()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-snapshots", action="store_true", help="write tests/snapshots anew")
    parser.addoption(
        "--one-of-each", type=int, metavar="SEED", help="one case of every slow test, drawn by SEED"
    )


SLOW = tuple(
    line
    for line in (ROOT / "tests" / "slow_tests.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
CASES = tuple(line for line in SLOW if "[" in line)


# The longest files, which begin first: a worker that gets one last would work alone.
FIRST = (
    "inductor_tokens", "families", "faults", "sampling", "mtp_windowed", "cli_dump", "lowering",
    "acceptance", "user", "matrix", "demo", "catalogue", "draft_model", "ops_sample", "ops_linear",
    "shared_kv", "quantize", "guides", "bounds", "snapshots", "step_graph", "cli_bench",
    "load_simulator", "eagle",
)  # fmt: skip


def _turn(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_")
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _is_named(nodeid: str, line: str) -> bool:
    """Whether a line is the test's name, its file's, or the beginning of its case's."""
    whole = nodeid.partition("[")[0]
    return line in (whole, whole.partition("::")[0]) or ("[" in line and nodeid.startswith(line))


def _is_slow(nodeid: str) -> bool:
    """Whether a line of slow_tests.txt names the test, its file, or the beginning of its case."""
    whole = nodeid.partition("[")[0]
    return not {whole, whole.partition("::")[0]}.isdisjoint(SLOW) or nodeid.startswith(CASES)


def _check_lists(items: list[pytest.Item]) -> None:
    """Every line of slow_tests.txt, of the files that were collected, is that of a test."""
    ids = sorted(item.nodeid for item in items)
    files = {name.partition("::")[0] for name in ids}
    for line in SLOW:
        place = bisect.bisect_left(ids, line)
        stale = place == len(ids) or not _is_named(ids[place], line)
        if stale and line.partition("::")[0] in files:
            raise pytest.UsageError(f"tests/slow_tests.txt: no test begins with {line!r}; mend it")
    stems = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    if missing := set(FIRST) - stems:
        raise pytest.UsageError(f"tests/conftest.py: FIRST names no test file: {sorted(missing)}")


def _one_of_each(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Of the cases of every slow test that runs anywhere, one."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "slow" in marks and not marks & {"gpu", "real", "fake_cuda"}:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    draw = random.Random(seed)
    return [draw.choice(alike) for alike in cases.values()]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files; mark the tests of slow_tests.txt; skip what cannot run here, saying why."""
    items.sort(key=_turn)
    if not any("::" in argument for argument in config.args):  # else files are not whole
        _check_lists(items)
    for item in items:
        if _is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
    seed = config.getoption("one_of_each")
    if seed is not None:
        chosen = _one_of_each(items, seed)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    if fake_device.is_here():
        for item in items:
            if item.get_closest_marker("gpu"):  # their kernels are interpreted
                item.add_marker(pytest.mark.fake_cuda)
                item.add_marker(pytest.mark.slow)
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", "needs a CUDA device"))
    if not fake_device.is_here():
        skips.append(("fake_cuda", "needs the fake device: make fake-cuda, make test-fake-cuda"))
    if os.environ.get("TRITON_INTERPRET") != "1":
        skips.append(("interp", "needs TRITON_INTERPRET=1 (off by default where there is a GPU)"))
    if not (ROOT / "models" / "smollm2-135m-instruct" / "config.json").is_file():
        skips.append(("real", "needs models/smollm2-135m-instruct: make smollm2"))
    for item in items:
        for marker, reason in skips:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Same random numbers in every test, in any order."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (libraries under test draw from the global state)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the fake device, tests for a GPU run our Triton kernels, interpreted."""
    is_for_gpu = request.node.get_closest_marker("gpu") is not None
    if is_for_gpu and fake_device.is_here():
        with fake_device.own_kernels():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def inductor_cache_dir() -> Path:
    """Where Inductor keeps compiled code between test runs."""
    path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Give torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def kernels() -> None:
    """Skip where the C++ operators cannot be built."""
    from compilespec.ops import load_kernels

    if not load_kernels():
        pytest.skip(
            "no C++ compiler: the references serve, and they promise no bitwise row independence"
        )
