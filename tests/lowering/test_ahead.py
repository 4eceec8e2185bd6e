"""Our Triton kernels are compiled by several workers, before anything is captured."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compilespec.lowering import ahead
from compilespec.ops._library import TRITON_KERNELS
from compilespec.program import StepKey
from compilespec.progress import Reporter
from tools.gpu.models import TINY_SHAPES
from tools.without_gpu.steps import meta_target, program_on_cuda

DECODE = StepKey("decode", 0)


@pytest.fixture(scope="module")
def program() -> Any:
    shape = TINY_SHAPES["llama-3.1-8b"]
    return program_on_cuda(meta_target(shape.family, shape.config, torch.bfloat16), "none")


def test_calls_of_all_layers_are_made_once_for_each_size(program: Any) -> None:
    sizes = [{"B": 1}, {"B": 5}]
    found = ahead.launches(program.graphs[DECODE], sizes)
    names = [name.partition(" ")[0] for name in found]
    assert {"paged_attention", "sample"} <= set(names) <= set(TRITON_KERNELS)
    assert all(names.count(name) == len(sizes) for name in names)
    queries = [call.args[0] for name, call in found.items() if name.startswith("paged_attention")]
    assert [query.shape for query in queries] == [(1, 2, 1, 16), (5, 2, 1, 16)]
    node = next(n for n in program.graphs[DECODE].graph_module.graph.nodes if ahead._kernel_of(n))
    assert node.args[0].meta["val"].stride()[1:] == queries[1].stride()[1:]


def test_prompts_have_two_sizes(program: Any) -> None:
    found = ahead.launches(program.graphs[StepKey("prefill", 0)], [{"R": 2, "T": 64}])
    query = next(call.args[0] for name, call in found.items() if name.startswith("paged_attention"))
    assert query.shape == (1, 2, 64, 16)


def test_launches_only_compile_and_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another thread are launched meanwhile; a call that fails costs itself alone."""
    _async_compile = pytest.importorskip("triton.runtime._async_compile")
    from triton.runtime.jit import JITFunction

    both = threading.Barrier(2)
    met: list[int] = []
    launched: list[tuple[str, bool]] = []

    def run(name: Any, *, warmup: bool) -> None:
        launched.append((name, warmup))
        mode = _async_compile.active_mode.get()
        if mode is not None:
            mode.submit(name, lambda: met.append(both.wait(30)), lambda kernel: None)

    def elsewhere() -> None:
        other = threading.Thread(target=lambda: JITFunction.run("elsewhere", warmup=False))
        other.start()
        other.join()

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    ahead.compile_launches({
        "fails": lambda: [][0],
        "a": lambda: JITFunction.run("a", warmup=False),
        "elsewhere": elsewhere,
        "b": lambda: JITFunction.run("b", warmup=False),
    })  # fmt: skip
    assert launched == [("a", True), ("elsewhere", False), ("b", True)]
    assert sorted(met) == [0, 1]
    assert JITFunction.run is run


@pytest.mark.parametrize("from_cache", [True, False])
def test_steps_from_disk_are_left_out(
    from_cache: bool, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their graphs were never made, and Triton has their kernels on disk."""
    graphs = {DECODE: program.graphs[DECODE]}
    config = SimpleNamespace(device=torch.device("cuda"))
    lowered: Any = SimpleNamespace(
        program=SimpleNamespace(config=config, graphs=graphs),
        graphs={DECODE: SimpleNamespace(from_cache=from_cache)},
    )
    compiled: list[str] = []
    monkeypatch.setattr(ahead, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(ahead, "compile_launches", compiled.extend)
    ahead.compile_kernels(lowered, {DECODE: [{"B": 1}]}, Reporter())
    assert bool(compiled) is not from_cache
