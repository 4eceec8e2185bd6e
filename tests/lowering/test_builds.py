"""Compilers in the background: what goes on meanwhile, and where their errors go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from compilespec import _torch_compat
from compilespec.lowering import inductor_options
from compilespec.lowering.artifacts import ArtifactCache, ArtifactKey, Interface, piece_file_key
from compilespec.lowering.builds import Builds

CPU = torch.device("cpu")
OPTIONS = inductor_options(CPU, "decode")
Submit = Callable[[Callable[[], None]], "Future[None]"]


def begin(builds: Builds, number: float) -> ArtifactKey:
    """Generate the code of a graph that no other test compiles."""

    def step(x: Tensor) -> tuple[Tensor]:
        return (x.abs() * number,)

    mode = _torch_compat.fake_mode()
    fake = _torch_compat.fake_tensor(mode, torch.zeros(7))
    gm = _torch_compat.retrace(fx.symbolic_trace(step), [fake], mode)
    key = piece_file_key(f"x.abs() * {number}", OPTIONS, CPU)
    builds.begin(key, gm, [fake], OPTIONS, Interface())
    return key


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Submit]:
    """What Inductor hands work for its threads to, with nothing in Inductor's own cache; the test
    puts it there.
    """
    from torch._inductor.async_compile import AsyncCompile

    given: list[Submit] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(AsyncCompile, "submit", lambda task: given[0](task))
    return given


def test_code_is_generated_while_a_compiler_is_at_work(
    submitted: list[Submit], tmp_path: Path
) -> None:
    """The compiler of the first graph waits for the code of the second."""
    is_second_begun, in_time = threading.Event(), []

    def when_begun(task: Callable[[], None]) -> None:
        in_time.append(is_second_begun.wait(120))
        task()

    cache, x = ArtifactCache(tmp_path), torch.randn(7)
    with ThreadPoolExecutor(2) as threads:
        submitted.append(lambda task: threads.submit(when_begun, task))
        with Builds(cache) as builds:
            keys = {number: begin(builds, number) for number in (2.125, 3.375)}
            assert not list(cache.directory.glob("*.bin"))
            is_second_begun.set()
            compiled = {number: builds[key] for number, key in keys.items()}
    assert in_time == [True, True]
    for number, key in keys.items():
        stored = cache.load(key)
        assert stored is not None
        assert torch.equal(compiled[number](x)[0], x.abs() * number)
        assert torch.equal(stored[0](x)[0], x.abs() * number)
        if _torch_compat.HAS_CPP_ENTRIES:
            assert compiled[number].library is not None


def test_what_the_compiler_says_is_raised_before_the_graph_is_called(
    submitted: list[Submit], tmp_path: Path
) -> None:
    def fail(task: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(RuntimeError("g++: out of memory"))
        return future

    submitted.append(fail)
    cache = ArtifactCache(tmp_path)
    with Builds(cache) as builds:
        key = begin(builds, 4.625)
        with pytest.raises(RuntimeError, match="out of memory"):
            _ = builds[key]
    with pytest.raises(ValueError, match="told"):
        stop_behind_one(cache)
    assert not list(cache.directory.glob("*"))


def stop_behind_one(cache: ArtifactCache) -> None:
    with Builds(cache) as builds:
        begin(builds, 5.875)  # its error is not the one to tell
        raise ValueError("told")
