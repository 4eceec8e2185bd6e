"""Stage "lower": what Inductor is given, what comes back from disk, what a second start costs."""

from __future__ import annotations

import errno
import logging
import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

import compilespec
from compilespec import SamplingParams, _torch_compat
from compilespec.errors import InvalidOption
from compilespec.lowering import INDUCTOR_OPTIONS, inductor_options, lower
from compilespec.lowering.artifacts import (
    ArtifactCache,
    Interface,
    artifact_key,
    piece_file_key,
)
from compilespec.lowering.constants import compile_graph
from compilespec.lowering.stitching import StitchPlan
from compilespec.program import PHASES, SpecProgram
from compilespec.progress import Progress, Reporter
from compilespec.runtime.executor import PrefillChunk
from compilespec.runtime.step_runner import StepRunner
from tests.support.models import tiny_target

PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture(scope="module")
def program() -> SpecProgram:
    return small_program()


def small_program(**changes: int) -> SpecProgram:
    """A two-layer llama, of the sizes of test_inductor_tokens.py: Inductor knows its code then."""
    target = tiny_target("llama", torch.float32, num_layers=2)
    return compilespec.trace(
        target, spec="none", **{"max_batch_size": 8, "max_seq_len": 75, **changes}
    )


def run(lowered: object, steps: int = 6) -> list[int]:
    runner = StepRunner(lowered)
    runner.set_blocks(0, [3, 1, 0])
    tokens = [*runner.prefill([PrefillChunk(row=0, start=0, tokens=PROMPT, next_token=None)])]
    for _ in range(steps):
        tokens += runner.decode([0])[0]
    return tokens


def test_second_start_compiles_nothing(program: SpecProgram, tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    told: list[Progress] = []
    first = lower(program, cache=cache, progress=Reporter(told.append))
    compiled = _torch_compat.count_compilations()
    again = small_program()
    second = lower(again, cache=cache, progress=Reporter(told.append))
    assert not any(phase.from_cache for phase in first.graphs.values())
    assert all(phase.from_cache for phase in second.graphs.values())
    assert _torch_compat.count_compilations() == compiled
    assert all("step" not in vars(graph) for graph in again.graphs.values()), "the retrace ran"
    done = [record for record in told if record.done and record.stage == "compile"]
    steps = [one for one in done if one.what != "C++ kernels"]
    assert [(one.what, one.index, one.total, one.from_cache) for one in steps] == [
        ("prefill", 1, 2, False), ("decode, K=0", 2, 2, False), ("machine code", None, None, None),
        ("prefill", 1, 2, True), ("decode, K=0", 2, 2, True),
    ]  # fmt: skip
    assert run(first) == run(second) == run(lower(program, backend="eager"))


def test_constants_of_a_graph_come_back_with_its_artifact(tmp_path: Path) -> None:
    """As static trees have them; Inductor alone would ask for them as inputs after loading."""
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)

    def step(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x[:, table[0].long()] * torch.tensor(2.5),)

    mode, x = _torch_compat.fake_mode(), torch.randn(2, 5)
    fake = _torch_compat.fake_tensor(mode, x)
    gm = _torch_compat.retrace(fx.symbolic_trace(step), [fake], mode)
    assert gm.graph.find_nodes(op="get_attr")
    compiled = compile_graph(gm, [fake], INDUCTOR_OPTIONS)
    key = piece_file_key("with constants", INDUCTOR_OPTIONS, torch.device("cpu"))
    ArtifactCache(tmp_path).save(key, compiled, Interface())
    call, _ = ArtifactCache(tmp_path).load(key)
    for one in (compiled, call):
        assert torch.equal(one(x)[0], step(x)[0])
    assert len(gm.graph.find_nodes(op="placeholder")) == 1, "the graph stays as it is"


def test_unreadable_artifact_is_compiled_again(
    program: SpecProgram, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ArtifactCache(tmp_path)
    expected = run(lower(program, cache=cache))
    for path in (tmp_path / "artifacts").glob("*.bin"):
        path.write_bytes(b"torn")
    with caplog.at_level(logging.WARNING, logger="compilespec"):
        assert run(lower(program, cache=cache)) == expected
    assert "compiling again" in caplog.text


def test_a_directory_that_cannot_be_written_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPILESPEC_CACHE_DIR", str(tmp_path / "file"))
    cache = ArtifactCache()
    for _ in range(2):
        cache.save_plan("k", StitchPlan(num_inputs=0, steps=(), outputs=()), Interface())
    (record,) = caplog.records
    assert f"{tmp_path / 'file'} cannot be written" in record.getMessage()
    assert "set COMPILESPEC_CACHE_DIR" in record.getMessage()


@pytest.mark.parametrize("damaged", ["k.bin", "k.plan.json"])
def test_what_is_unreadable_and_cannot_be_deleted_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    cache = ArtifactCache(tmp_path)
    cache.directory.mkdir()
    (cache.directory / "k.json").write_text('{"inputs": [], "outputs": []}')
    (cache.directory / damaged).write_text("[]")
    monkeypatch.setattr(Path, "unlink", refuse)
    assert cache.load("k") is None
    assert cache.load_plan("k") is None


@pytest.mark.parametrize(
    "change", [{"max_batch_size": 5}, {"max_seq_len": 65}, {"kv_cache_tokens": 96}], ids=str
)
def test_key_covers_every_size(program: SpecProgram, change: dict[str, int]) -> None:
    other = small_program(**change)
    keys = [artifact_key(p.graphs["decode"], p, INDUCTOR_OPTIONS) for p in (program, other)]
    assert keys[0] != keys[1]


def test_key_covers_options_and_phase(program: SpecProgram) -> None:
    keys = {artifact_key(graph, program, INDUCTOR_OPTIONS) for graph in program.graphs.values()}
    keys.add(artifact_key(program.graphs["decode"], program, {}))
    assert len(keys) == 3


def test_a_key_on_cuda_covers_the_gpu_triton_and_the_place(
    program: SpecProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine code of one GPU must not be found by another, nor that of cuda:0 by cuda:1."""
    gpus = {"H100": (9, 0), "L4": (8, 9), "A100": (8, 0)}

    def keys(gpu: str, index: int, triton_version: str) -> set[str]:
        major, minor = gpus[gpu]
        found = types.SimpleNamespace(name=gpu, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(triton, "__version__", triton_version)
        device = torch.device("cuda", index)
        there = replace(program, config=replace(program.config, device=device))
        step = artifact_key(there.graphs["decode"], there, INDUCTOR_OPTIONS)
        return {step.name, piece_file_key("a piece", INDUCTOR_OPTIONS, device).name}

    triton = pytest.importorskip("triton")
    made = [keys(gpu, 0, "3.7") for gpu in gpus]
    made += [keys("H100", 1, "3.7"), keys("H100", 0, "3.8")]
    assert len(set().union(*made)) == 2 * len(made)
    assert keys("H100", 0, "3.7") == made[0]


def test_only_steps_on_the_cpu_get_a_cpp_wrapper() -> None:
    """On CUDA it is compiled by nvcc, which torch's own packages do not bring."""
    for phase in PHASES:
        cuda = inductor_options(torch.device("cuda", 0), phase)
        assert not [name for name in cuda if name.startswith("cpp")]
        # nothing is timed while starting
        untimed = {"shape_padding": False, "triton.autotune_pointwise": False}
        assert cuda == {**INDUCTOR_OPTIONS, **untimed}
    assert inductor_options(torch.device("cpu"), "decode")["cpp_wrapper"]


def test_generated_code_writes_caches_in_place(program: SpecProgram) -> None:
    """No clone, no copy and no buffer of a cache's size in what Inductor generates."""
    from torch._inductor.utils import run_and_get_code

    graph = program.graphs["decode"]

    def compile_and_run() -> object:
        call = _torch_compat.standalone_compile(
            graph.graph_module, graph.fakes, {**INDUCTOR_OPTIONS, "force_disable_caches": True}
        )
        buffers = {b.name: torch.full(b.shape, b.fill, dtype=b.dtype) for b in program.buffers}
        weights = {}
        for spec in graph.inputs:
            if spec.kind == "weight":
                parts = torch.cat([program.weights[name] for name in spec.sources])
                weights[spec.name] = (
                    torch.ops.compilespec.pack_weight(parts) if spec.packed else parts
                )
        feeds = {**buffers, **weights, "row_B": torch.tensor([0, 1], dtype=torch.int32)}
        with torch.no_grad():
            return call(*(feeds[spec.name] for spec in graph.inputs))

    _, codes = run_and_get_code(compile_and_run)
    code = "\n".join(codes)
    cache = next(b for b in program.buffers if b.kind == "cache")
    assert "paged_attention.default(" in code
    shape = ", ".join(str(size) for size in cache.shape)
    assert not re.search(rf"empty_strided_cpu\(\({shape}\)", code)
    assert "aten.clone" not in code
    assert "auto_functionalized" not in code


def test_unknown_backend_is_refused(program: SpecProgram) -> None:
    with pytest.raises(InvalidOption, match="inductor, eager"):
        lower(program, backend="tvm")


def test_symbolic_batch_serves_every_size() -> None:
    """One artifact a phase for every B; the tokens are those of each prompt alone."""
    target = tiny_target("llama", torch.float32, num_layers=2)
    prompts = [[3 + i, *range(10, 10 + 4 * i)] for i in range(4)]
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    with compilespec.compile(target, spec="none", max_batch_size=8, max_seq_len=75) as engine:
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
        for count in (2, 3, 4):
            together = [output.token_ids for output in engine.generate(prompts[:count], params)]
            assert together == alone[:count]
        assert engine.stats().num_recompiles == 0


def test_inductors_own_cache_knows_the_signatures_of_our_operators(monkeypatch):
    """Its key has an operator's name alone; code made for an earlier signature would crash."""
    from torch.compiler import config

    seen = []
    monkeypatch.setattr(
        torch._inductor, "standalone_compile", lambda *_, **__: seen.append(config.cache_key_tag)
    )
    schemas = torch._C._jit_get_all_schemas()
    for found in (schemas, schemas, [one for one in schemas if "draw" not in one.name]):
        monkeypatch.setattr(torch._C, "_jit_get_all_schemas", lambda found=found: found)
        _torch_compat.operators_digest.cache_clear()
        _torch_compat.standalone_compile(torch.fx.GraphModule({}, torch.fx.Graph()), [], {})
    _torch_compat.operators_digest.cache_clear()
    assert seen[0] == seen[1] != seen[2]
    assert config.cache_key_tag not in seen
