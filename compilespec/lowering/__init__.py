"""Stage "lower": turns program graphs into callables, through Inductor or interpreted ("eager")."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from compilespec import _torch_compat
from compilespec.errors import PassError
from compilespec.errors.suggest import not_one_of
from compilespec.lowering.artifacts import (
    ArtifactCache,
    ArtifactKey,
    Interface,
    artifact_key,
    piece_file_key,
)
from compilespec.lowering.attention_choice import attention_kernels
from compilespec.lowering.builds import Builds
from compilespec.lowering.host_waits import why_host_waits
from compilespec.lowering.native import native_call
from compilespec.lowering.pieces import split_at_attention
from compilespec.lowering.stitching import Stitched, StitchPlan
from compilespec.lowering.vector_isas import remember_vector_isas
from compilespec.ops import _build
from compilespec.ops.device import traits_of
from compilespec.program import ByStep, Lowered, LoweredPhase, Phase, PhaseGraph, SpecProgram
from compilespec.progress import Reporter, Step

logger = logging.getLogger("compilespec")

BACKENDS = ("inductor", "eager")
Units = Literal["auto", "whole", "pieces"]
T = TypeVar("T")
Finish = Callable[[], LoweredPhase]  # waits for the compilers of a step
TO_ATEN = "to ATen"  # the part of rewriting that a cached step skips

# Phases with this many attention layers or more are compiled in pieces: compile time then hardly
# grows with depth.  On the CPU one C++ call runs all pieces, as fast as the whole.  Called from
# Python they cost host time: a fifth of a decode step of 8 layers of width 256 on the CPU, less for
# wider layers.  Replayed as one CUDA graph they cost nothing.
PIECES_FROM_LAYERS = 16
NATIVE_PIECES_FROM_LAYERS = 4  # fewer layers have hardly more structures than pieces

# Inductor never owns CUDA graphs (its trees copy inputs and re-record).  It rounds bf16 results
# where eager does, so that the two backends agree.
INDUCTOR_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False,
    "emulate_precision_casts": True,
    "size_asserts": False,
    "nan_asserts": False,
    "fallback_random": True,
}

# Inductor recomputes a value of up to 30 operations in every kernel that reads it, such as the
# cosines and sines of the rotary embedding in each layer.  On the CPU, values of more than 8
# operations that several kernels read are stored; on CUDA that would be three launches more in each
# layer with experts, and pieces share the tables as it is.
#
# A decode step is a hundred short calls: a C++ wrapper around them takes a third off the step.
# Besides products and attention there are only a few rows of element-wise work, for which a
# parallel region costs more than it saves; a fixed thread count would tie the artifact to the
# machine.  A prefill has such a wrapper only in pieces, where it is short to compile.  On CUDA a
# graph replays the step, and the wrapper would need a CUDA toolkit, which torch's own packages do
# not bring.  Products of odd sizes are not padded there: Inductor would time them while it
# compiles, and might copy their weights in every step.  Blocks of element-wise kernels follow from
# sizes: Inductor would time them at a kernel's first launch, which is in the largest bucket.
CPU_OPTIONS: dict[Phase, dict[str, Any]] = {
    "decode": {"realize_opcount_threshold": 8, "cpp_wrapper": True, "cpp.threads": 1},
    "prefill": {"realize_opcount_threshold": 8, "cpp.dynamic_threads": True},
}
CPU_PIECES_OPTIONS: dict[str, Any] = {"cpp_wrapper": True}
CUDA_OPTIONS: dict[str, Any] = {"shape_padding": False, "triton.autotune_pointwise": False}


def lower(
    program: SpecProgram,
    *,
    backend: str = "inductor",
    cache: ArtifactCache | None = None,
    units: Mapping[Phase, Units] | None = None,
    progress: Reporter | None = None,
) -> Lowered:
    """One callable per graph; with "eager", the same rewritten graphs, run operator by operator.

    Args:
        units: what is compiled at once, by phase: the "whole" step, or its "pieces" between
            attention calls; "auto", the default of a phase that is not named, means pieces for
            targets of `pieces_from_layers` or more.
    Raises: InvalidOption for an unknown backend.
    """
    if backend not in BACKENDS:
        raise not_one_of("backend", backend, BACKENDS)
    if backend == "inductor":
        remember_vector_isas()
    artifacts, wanted, progress = cache or ArtifactCache(), units or {}, progress or Reporter()
    numbers, total = itertools.count(1), len(program.graphs)
    prepare_kernels(program.config.device, progress)
    attention = attention_kernels(program)

    def begin(graph: PhaseGraph, builds: Builds) -> Finish:
        unit, index = wanted.get(graph.phase, "auto"), next(numbers)
        if backend == "eager":
            title = f"{graph.key}, {TO_ATEN}"
            with progress.step("rewrite", title, index=index, total=total):
                phase = _interpret(graph, program.config.device, unit)
                return lambda: phase
        with progress.step("compile", str(graph.key), index=index, total=total) as step:
            return _begin(graph, program, builds, unit, step)

    with Builds(artifacts) as builds:
        begun = [begin(graph, builds) for graph in program.graphs.values()]
        builds.finish(progress)
        phases = ByStep(finish() for finish in begun)
    return Lowered(program=program, backend=backend, graphs=phases, attention=attention)


def check_compiler(backend: str, device: torch.device) -> None:
    """Refuse, before anything is loaded, what must be compiled and cannot be.

    Raises: MissingDependency (no compiler, no headers), InvalidOption (no place for the kernels).
    """
    if backend != "inductor" or not traits_of(device).is_cpu:
        return
    _build.check_writable()
    if _build.is_cached() is False or ArtifactCache().is_empty():
        _build.check_compiler()


def prepare_kernels(device: torch.device, progress: Reporter) -> None:
    """Load the C++ kernels, and compile them if needed, as the CPU's first call would."""
    if not traits_of(device).is_cpu or not _build.kernels_untried():
        return
    with progress.step("compile", "C++ kernels") as step:
        is_cached = _build.is_cached()
        if is_cached is not None:
            why = "" if is_cached else "none are cached for this CPU, compiler and torch"
            step.tell(from_cache=is_cached, why=why)
        _build.load_kernels()


def _interpret(graph: PhaseGraph, device: torch.device, unit: Units) -> LoweredPhase:
    def cut() -> Stitched | None:
        plan, pieces = split_at_attention(graph.graph_module)
        return Stitched(plan, {key: one.graph_module.forward for key, one in pieces.items()})

    stitched = _unless_whole(graph, unit, cut, lambda: None)
    return LoweredPhase(
        key=graph.key,
        call=_with_no_grad(stitched or graph.graph_module.forward),
        compile_ms=0.0,
        from_cache=False,
        stitched=stitched,
        **_interface(graph, device)._asdict(),
    )


def _interface(graph: PhaseGraph, device: torch.device) -> Interface:
    return Interface(graph.inputs, graph.outputs, why_host_waits(graph.graph_module, device))


def _begin(
    graph: PhaseGraph, program: SpecProgram, builds: Builds, unit: Units, step: Step
) -> Finish:
    """Load a step, or generate its code: compilers may still be at work on it."""
    if unit == "auto":
        is_deep = graph.num_layers >= pieces_from_layers(program.config.device)
        unit = "pieces" if is_deep else "whole"
    return _unless_whole(
        graph,
        unit,
        lambda: _begin_pieces(graph, program, builds, step),
        lambda: _begin_whole(graph, program, builds, step),
    )


def _unless_whole(
    graph: PhaseGraph, unit: Units, in_pieces: Callable[[], T], whole: Callable[[], T]
) -> T:
    """The graph as `in_pieces` makes it where pieces are asked for and it can be cut; else as
    `whole` does.
    """
    if unit == "pieces":
        try:
            return in_pieces()
        except PassError as error:
            logger.warning("%s is lowered as a whole: %s", graph.key, error)
    return whole()


def pieces_from_layers(device: torch.device) -> int:
    """The number of attention layers from which a phase is compiled in pieces by default."""
    is_native = traits_of(device).is_cpu and _torch_compat.HAS_CPP_ENTRIES and _build.load_kernels()
    return min(NATIVE_PIECES_FROM_LAYERS, PIECES_FROM_LAYERS) if is_native else PIECES_FROM_LAYERS


def inductor_options(
    device: torch.device, phase: Phase, *, in_pieces: bool = False
) -> dict[str, Any]:
    """Inductor's options for a step of a phase on a device, or for its pieces."""
    others = {"cpu": CPU_OPTIONS[phase], "cuda": CUDA_OPTIONS}.get(traits_of(device).kind, {})
    pieces = CPU_PIECES_OPTIONS if in_pieces and traits_of(device).is_cpu else {}
    return {**INDUCTOR_OPTIONS, **others, **pieces}


def _begin_whole(graph: PhaseGraph, program: SpecProgram, builds: Builds, step: Step) -> Finish:
    started, cache = time.perf_counter(), builds.cache
    options = inductor_options(program.config.device, graph.phase)
    key = artifact_key(graph, program, options)
    stored = cache.load(key)
    step.note(from_cache=stored is not None)
    if stored is None:
        _tell_why(graph, key, cache, step)
        interface = _interface(graph, program.config.device)
        builds.begin(key, graph.graph_module, graph.fakes, options, interface)
        cache.keep_key(key)
    begun_ms = _ms_since(started)

    def finish() -> LoweredPhase:
        started = time.perf_counter()
        call, known = stored or (builds[key], interface)
        return LoweredPhase(
            key=graph.key,
            call=_with_no_grad(call),
            compile_ms=begun_ms + _ms_since(started),
            from_cache=stored is not None,
            **known._asdict(),
        )

    return finish


def _begin_pieces(graph: PhaseGraph, program: SpecProgram, builds: Builds, step: Step) -> Finish:
    """Compile each distinct piece that is not in the cache; pieces of other models count.

    Raises: PassError if the graph cannot be cut.
    """
    started, cache = time.perf_counter(), builds.cache
    device = program.config.device
    options = inductor_options(device, graph.phase, in_pieces=True)
    key = artifact_key(graph, program, {**options, "units": "pieces"})
    stored = cache.load_plan(key)
    calls = {} if stored is None else _load_pieces(stored[0], options, device, cache)
    is_warm = stored is not None and len(calls) == len(stored[0].keys)
    step.note(from_cache=is_warm)
    begun: dict[str, ArtifactKey] = {}
    if stored is None or not is_warm:
        _tell_why(graph, key, cache, step)
        plan, pieces = split_at_attention(graph.graph_module)
        interface, calls = _interface(graph, device), {}
        for number, (name, piece) in enumerate(pieces.items(), 1):
            step.tell(detail=f"part {number} of {len(pieces)}")
            file_key = piece_file_key(name, options, device)
            found = None if file_key in builds else cache.load(file_key)
            if found is not None:
                calls[name] = found[0]
                continue
            begun[name] = file_key
            if file_key not in builds:
                builds.begin(file_key, piece.graph_module, piece.fakes, options, Interface())
        cache.save_plan(key, plan, interface)
        cache.keep_key(key)
    else:
        plan, interface = stored
    begun_ms = _ms_since(started)

    def finish() -> LoweredPhase:
        started = time.perf_counter()
        calls.update((name, builds[file_key]) for name, file_key in begun.items())
        stitched = Stitched(plan, calls, native_call(plan, calls))
        return LoweredPhase(
            key=graph.key,
            call=_with_no_grad(stitched),
            compile_ms=begun_ms + _ms_since(started),
            from_cache=is_warm,
            stitched=stitched,
            **interface._asdict(),
        )

    return finish


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def _tell_why(graph: PhaseGraph, key: ArtifactKey, cache: ArtifactCache, step: Step) -> None:
    """Report why a step must be compiled, and make the ATen graph to compile.  Raises:
    MissingDependency for the CPU without a compiler.

    Raises: MissingDependency, where it is for the CPU and there is no compiler.
    """
    if dict(key.parts)["device"].startswith("cpu"):
        _build.check_compiler()
    step.tell(why=cache.why_new(key))
    with step.inside("rewrite", TO_ATEN):
        _ = graph.step


def _load_pieces(
    plan: StitchPlan, options: dict[str, Any], device: torch.device, cache: ArtifactCache
) -> dict[str, Callable[..., Any]]:
    """The pieces of a plan that are in the cache; where all are C++, their libraries alone."""
    keys = {name: piece_file_key(name, options, device) for name in plan.keys}
    opened = {name: cache.open_library(key) for name, key in keys.items()}
    libraries = {name: piece for name, piece in opened.items() if piece is not None}
    if len(libraries) == len(keys) and _build.load_kernels():
        return {**libraries}
    found = {name: cache.load(key) for name, key in keys.items()}
    return {name: stored[0] for name, stored in found.items() if stored is not None}


def _with_no_grad(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            result: Sequence[torch.Tensor] = call(*inputs)
        return result

    return run
